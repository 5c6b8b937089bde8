"""DeepSpeed's ZeRO: parameters that are split over a group, and fragments of their master copies."""
