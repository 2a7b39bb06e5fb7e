"""A double of today's Apex, for machines without a GPU: it proves our calls, not Apex."""
