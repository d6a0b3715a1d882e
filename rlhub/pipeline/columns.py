"""The vocabulary of a training step: every column that the nodes of a pipeline read and write, with its type, meaning and writer.

A column has one value per element of its dims, and is written once.  The types are those in which a column is stored and travels:
masks are bool and ids int32; where a worker reads them they are padded and int64.  A pipeline may add columns of its own: their
writer declares them as "name:dtype(dims)".

A node names its columns in one string, `"values? response_mask style_score:float32(rows)"`: a question mark says that the column
may be missing, dtype and dims are checked against the declaration.  A name that ends in `*` stands for a family of columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Dim = Literal["rows", "prompt", "response", "sequence", "chunk", "action", "pixel", "choice"]
"""rows: samples, or pairs.  prompt, response, sequence: tokens, padded on the left, on the right, and both.  chunk, action: the
chunks of actions of a robot's episode, and the actions of one.  pixel: the colours of pictures.  choice: the experts of a token,
of all layers."""
DIMS: tuple[str, ...] = get_args(Dim)
DTYPES = ("float32", "float64", "bfloat16", "int32", "int64", "uint8", "bool", "object")

ROW_ORDER = "row_order"
"""The column by which a node puts the rows in another order; see Executor."""
USE = re.compile(r"(?P<name>[\w/]+\*?)(?P<optional>\??)(?::(?P<dtype>\w+)(?:\((?P<dims>[\w ]*)\))?)?")
ITEM = re.compile(r"[^\s(]+(?:\([^)]*\)\S*)?")


@dataclass(slots=True, frozen=True)
class StepColumn:
    """One column.  dims: () is one number of the whole step, which travels in a batch's meta_info.  writer: the usual one."""

    name: str
    dtype: str
    dims: tuple[str, ...]
    meaning: str
    writer: str

    @property
    def wide(self) -> bool:
        """Returns whether a row has more than one number."""
        return len(self.dims) > 1

    @property
    def type(self) -> str:
        """Returns for example float32(rows response)."""
        return f"{self.dtype}({' '.join(self.dims)})"


@dataclass(slots=True, frozen=True)
class Use:
    """One column as a node names it.  dtype, dims: None where the node states none."""

    name: str
    optional: bool = False
    dtype: str | None = None
    dims: tuple[str, ...] | None = None

    @property
    def family(self) -> bool:
        """Returns whether this stands for all columns that begin like it."""
        return self.name.endswith("*")

    def covers(self, name: str) -> bool:
        """Returns whether a column of that name is meant."""
        return name.startswith(self.name[:-1]) if self.family else name == self.name

    def __str__(self) -> str:
        dims = "" if self.dims is None else f"({' '.join(self.dims)})"
        return f"{self.name}{'?' * self.optional}{'' if self.dtype is None else ':' + self.dtype + dims}"


def parse_uses(given: str | Iterable[str]) -> tuple[Use, ...]:
    """Returns the columns in a text or in several, each once, in order.  What cannot be read is a column of that odd name, which
    the checks then do not find."""
    texts = [given] if isinstance(given, str) else list(given)
    found = [_parse(item) for text in texts for item in ITEM.findall(text)]
    return tuple({use.name: use for use in reversed(found)}[name] for name in dict.fromkeys(use.name for use in found))


def _parse(item: str) -> Use:
    match = USE.fullmatch(item)
    if match is None:
        return Use(item)
    dims = match["dims"]
    return Use(match["name"], bool(match["optional"]), match["dtype"], None if dims is None else tuple(dims.split()))


TABLE = """
# of the step
step                int64()                  executor             the number of the training step, from 1
weights_version     int64()                  publish              the version of the weights that the rollout engines have
# of a row
ordinal             int64(rows)              sample               the prompt's number among all that were drawn; seeds follow it
uid                 int64(rows)              sample               the group of samples of one prompt, from 0
sample_index        int64(rows)              sample               the row's number as it was drawn, from 0
episode_id          int64(rows)              sample               the number of the row's episode, where some have several rows
estimator           int64(rows)              sample               whose advantage estimator: 0 the run's, else a data source's
prompt_length       int64(rows)              sample               tokens of the prompt
response_length     int64(rows)              sample               tokens of the response
episode             int64(rows)              sample               the episode of a policy's call, from 0
call                int64(rows)              sample               the number of the call in its episode, from 0
terminated          bool(rows)               sample               the call has ended its episode; else it goes on or was cut off
next_values         float32(rows)            sample               the value of the state behind an episode's last call
finish_reason       int64(rows)              sample               how the response ended: 0 stop, 1 length, 2 abort
tool_rewards        float64(rows)            sample               the sum of the rewards that tools gave
data_source         object(rows)             sample               the name of the data, for the scorers
ground_truth        object(rows)             sample               the answer that the data gives, for the scorers
extra_info          object(rows)             sample               what else the data says of the prompt, for the scorers
scores              float32(rows)            score                the reward of the sample
configured_scores   float32(rows)            score                the reward without what tools gave, where they gave some
valid               bool(rows)               score                the sample has a score; others do not train
baseline_rewards    float32(rows)            score                the reward of the prompt's greedy response
group_metric        float64(rows)            score                the number in which dynamic sampling compares samples
reward/*            float64(rows)            score                the scorer's own numbers by name
rm_scores           float32(rows)            compute_rm_score     the reward model's score of the text
row_order           int64(rows)              balance              the order of the rows from then on; who reads it waits for it
mini_batch          int64(rows)              balance              the optimizer step of the policy that the row belongs to, from 0
critic_mini_batch   int64(rows)              balance              the same for the critic
frame               int64(rows)              next_batch           the number of a recorded frame, whose pictures the workers read
margin              float64(rows)            next_batch           by how much the chosen response of a pair is better
images              uint8(rows pixel)        sample               the prompt's pictures: the bytes of their image files
# of a token
prompts             int32(rows prompt)       sample               the prompt's tokens
responses           int32(rows response)     sample               the tokens of the response, those of tools and users included
input_ids           int64(rows sequence)     sample               prompt and response, padded; made where they are read
attention_mask      int64(rows sequence)     sample               1 on the tokens of input_ids that are no padding
response_mask       bool(rows response)      sample               the tokens of the response that the model wrote
rollout_log_probs   float32(rows response)   sample               log-probs of the sampled tokens by the rollout engine
routed_experts      uint8(rows sequence choice) sample             the experts of each token but the last, of all layers
policy_version      int32(rows response)     sample               the version of the policy that wrote each token
given_rewards       float32(rows response)   sample               the rewards that the workflow gave, each on its token
added_rewards       float32(rows response)   sample               the rewards that tools gave, each on its token
token_level_scores  float32(rows response)   score                the reward on the token that earned it, usually the last
old_log_probs       float32(rows response)   compute_log_prob     log-probs by the policy before the update
sum_pi_squared      float32(rows response)   compute_log_prob     the sum of the squared probabilities of all tokens
ref_log_prob        float32(rows response)   compute_ref_log_prob log-probs by the frozen reference
values              float32(rows response)   compute_values       the critic's value of the state before each token
advantages          float32(rows response)   compute_advantages   how much better than expected each token was
returns             float32(rows response)   compute_advantages   the target of the values
learn_mask          bool(rows response)      compute_advantages   response_mask of the rows that train
importance_weights  float32(rows response)   rollout_correction   trainer's over rollout's probability, bounded
loss_mask           bool(rows response)      rollout_correction   learn_mask without rejected tokens, where there are any
selected            bool(rows response)      select_tokens        the tokens that the policy's loss chose from the mini-batch
# of a robot's episode
pixel_values        uint8(rows pixel)        sample               the pictures that the policy read, of all cameras
actions             float32(rows chunk action) sample             the actions that were taken
"""
"""One column a line: name, type, usual writer, meaning."""
ROW = re.compile(r"(?P<name>\S+) +(?P<dtype>\w+)\((?P<dims>[\w ]*)\) +(?P<writer>\w+) +(?P<meaning>.+)")


def _read(table: str) -> dict[str, StepColumn]:
    matches = [ROW.fullmatch(line) for line in table.strip().splitlines() if not line.startswith("#")]
    assert all(matches), "each line is a column"
    rows = [match.groupdict() for match in matches if match is not None]
    return {row["name"]: StepColumn(**(row | {"dims": tuple(row["dims"].split())})) for row in rows}


COLUMNS = _read(TABLE)
