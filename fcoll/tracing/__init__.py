"""What a trace is made with: fake worlds, fake copies of tensors, a recorder of dispatched ops."""
