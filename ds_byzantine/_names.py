"""Names by which parts that may not import each other find each other."""

ATTRIBUTE = "_ds_byzantine"  # of an engine: its `Attachment`, which refers to the engine and so may not lie elsewhere
REHEARSAL = "DS_BYZANTINE_REHEARSAL"  # names the file of `ds-byzantine drill --script` for the ranks that it starts
