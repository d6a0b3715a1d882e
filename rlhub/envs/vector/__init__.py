"""Environments in lock-step: N simulators take a chunk of actions together, and return pictures, states and rewards as arrays.

base.py         the interfaces VectorEnv and Simulator, and the arrays that cross them
lockstep.py     a VectorEnv of N simulators in this process: chunks, ends of episodes, new episodes, states
segment.py      the memory that a manager shares with a child, and the child's side of the calls
manager.py      EnvManager: the same interface over killable child processes
check.py        check_vector_env, the conformance suite that every environment passes
reach_color.py  a hand that must touch the target whose colour the instruction names (MuJoCo)
maniskill.py    tasks of ManiSkill, in a Python of their own

The interface, for a process that owns environments (N environments, chunks of C actions of A numbers, K cameras of H x W pixels,
states of D numbers):

    manager = EnvManager(EnvManagerOptions(name="reach_color", num_envs=64, processes=8))   # starts on first use
    manager.spec                                                    VectorSpec: cameras, height, width, state_dim, action_dim,
                                                                    low, high, chunk, max_steps, language, state, initial_states
    obs = manager.reset(ids=None, seeds=[...], initial=None)        Obs of len(ids) rows, in the order of ids
    obs.images (N, K, H, W, 3) uint8; obs.state (N, D) float32; obs.instruction: list of N str; obs.seed (N,) int64
    result = manager.chunk_step(actions (N, C, A) float32, obs="last")       or submit_chunk(...) -> Future[ChunkResult]
    result.obs                                                      Obs of N rows: what the policy acts on next
    result.reward (N, C) float32; result.terminated, result.truncated, result.valid (N, C) bool
    result.success, result.lost, result.ended (N,) bool; result.final_obs: Obs of the ended rows, in order of their ids
    result.info: N dicts; result.num_rendered; result.frames: Obs of (N, C, ...), only with obs="all"
    manager.get_state(ids) -> list[bytes]; manager.load_state(ids, states) -> Obs; manager.offload(); manager.onload()

All arrays belong to the caller.  A row of `valid` that is False was not executed: it comes after the end of the episode, or the
row's process was lost (`lost`), whose environment then begins a new episode.  A policy call takes one row of `images` as a
fixed-size uint8 column (K, H, W, 3) of the ColumnStore of the process that owns the manager; pictures never cross the driver.
"""
