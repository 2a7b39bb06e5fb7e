"""A double of the older Apex, for machines without a GPU: it proves our calls, not Apex."""
