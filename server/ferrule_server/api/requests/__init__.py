"""From messages to jobs. A request that is read here is valid for the model; an error names its field.

inputs.py     prefill, decode, unified and batch requests; holds the readers below
fields.py     fields of many requests: handles, token ids, request ids, leases
policy.py     LogitsReturnPolicy: the fields of each row, and how a token is chosen
masks.py      the three forms of a token mask
verify.py     VerifyInput: drafts, and the distributions that they were sampled from
streaming.py  GenerateRequest and ForwardRequest
caches.py     fork, truncate, reserve, release, keep-alive, info, list
chat.py       the conversation of ApplyChatTemplate
planned.py    an append that was read: its job, and how its result is written
"""
