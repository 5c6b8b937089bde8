"""DeepSpeed's ZeRO: parameters split over a group, and fragments of their master copies."""
