"""The Ferrule server: a decoder-only language model behind explicit KV-cache handles.

api/         the wire: gRPC, credentials, metrics, the web page
engine/      the engine thread: jobs, appends, steps
fairness/    turns, places and rates of principals
kv/          sequences and their blocks: integers only
durability/  the journal of durable handles
executor/    runs steps: torch, GPU kernels, the paged reference
model/       configuration, weights, decoder, families of models, the hub
kernels/     every operation in plain torch, as CPU and as GPU kernels
text/        tokenizer, text of drawn tokens, chat templates
model_check/ what a model would need and which executor would run it

__main__.py     reads the settings and does what they say
composition.py  puts the parts of a server together, and serves
console.py      what is printed for people: the line `ready`, progress, what is wrong
process.py      what libraries read when they start, signals, exit codes
config.py       the settings, each declared once
settings.py     how a setting is declared: kinds of values, groups
arguments.py    the command line, the environment and the file, read into the settings
config_file.py  settings in a TOML file
addresses.py    addresses to listen on, parsed and checked
loading.py      chooses and loads model and executor by the settings
host.py         the machine: its processor, and the cores and memory that the process may use
model_files.py  reads the small files of a model folder, which strangers write
named_models.py the models with a name of their own: demo, smollm2
errors.py       every error of the server, with its reason
quotas.py       what one principal may use at most
suffixes.py     finds runs of tokens at the end of a text
log_format.py   lines of the log, as text and as JSON
"""

__version__ = "0.1.0"
