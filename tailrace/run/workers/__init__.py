"""The worker processes of a run whose tasks are separate: what each kind is made of."""
