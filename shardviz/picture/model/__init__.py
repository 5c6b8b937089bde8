"""What is drawn, whatever draws it: who holds which block, where blocks meet, the colours and labels of ranks."""
