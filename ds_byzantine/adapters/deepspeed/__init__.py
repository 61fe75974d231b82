"""DeepSpeed: ZeRO 0 to 3 and the bf16 optimizer."""
