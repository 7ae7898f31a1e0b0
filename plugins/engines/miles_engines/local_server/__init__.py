"""The built-in engine's server process: a `transformers` model behind SGLang's requests and answers.

Started by `miles_engines.local` as `python -m miles_engines.local_server`. One thread runs the model
(`scheduler`), the event loop parses requests and builds answers; tokens cross between them as `Job` fields.

::

    http → chat, generate, admin        routes; each answer in SGLang's shape (protocol, replies, text)
             │ Job ▲
             ▼     │
         scheduler → batch → model, kv, sampling          one step: every running request gets one token
                   → prefix_cache                         what finished requests leave for the next ones
"""
