"""What `--engine sglang` is made of: its flags, the processes it starts, and what runs inside SGLang's."""
