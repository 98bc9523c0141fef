"""A Trainer of transformers, a loop with accelerate and a Lightning module with mpidl."""
