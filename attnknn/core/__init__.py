"""The method: search, weigh, vote, and what is fitted for it; torch, faiss and numpy alone."""
