"""The recipe sweep: lanes are runs of experiments.grpo, kill and resume."""

import dataclasses
import json
import math
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import grpo
from experiments import recipe_sweep
from experiments import run
from experiments import sweep_lanes
from experiments import sweep_start
from nvfp4_jax import policy
from nvfp4_jax import recipes
from nvfp4_jax import sampler
from nvfp4_jax import tasks
from nvfp4_jax.models import transformer
from nvfp4_jax.rl import evaluation
from nvfp4_jax.rl import learner

SMOKE = recipe_sweep.PRESETS['smoke'][1]
ARRAYS = {*sweep_lanes.METRICS, *sweep_lanes.ACCURACIES}
FILES = ('metrics.jsonl', 'table.json')


def _arrays(path):
  return {name: np.asarray(values) for name, values in np.load(path).items()}


def _results(workdir):
  """Returns all that the smoke sweep's two groups hold, by run."""
  groups = [
      _arrays(workdir / 'groups' / f'{name}-experts-0.npz')
      for name in SMOKE.recipes
  ]
  return {
      name: np.concatenate([group[name] for group in groups])
      for name in (*sweep_lanes.METRICS, *sweep_lanes.ACCURACIES)
  }


@pytest.mark.slow
class RecipeSweepTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(folder.cleanup)
    cls.folder = pathlib.Path(folder.name)
    cls.workdir = cls.folder / 'whole'
    args = ['smoke', f'--workdir={cls.workdir}']
    run.launch(recipe_sweep.main, recipe_sweep.PRESETS, args)
    cls.rows = run.read_rows(cls.workdir / 'metrics.jsonl')
    cls.curves = _arrays(cls.workdir / 'curves.npz')
    cls.results = _results(cls.workdir)
    cls.cfg = dataclasses.replace(SMOKE, workdir=cls.workdir)
    cls.starts = sweep_start.warm_starts(
        SMOKE.warm_start, SMOKE.warm_starts, cls.workdir / 'warm_starts'
    )

  def test_a_row_for_each_run(self):
    labels = [(row['recipe'], row['warm_start']) for row in self.rows]
    self.assertEqual(
        labels,
        [('bf16', 0), ('bf16', 1), ('nvfp4_naive', 0), ('nvfp4_naive', 1)],
    )
    for row in self.rows:
      self.assertGreater(row['end_reward'], 0)
      self.assertGreater(row['peak_grad_norm'], 0)
      self.assertEqual(row['skipped'], 0)
      is_bf16 = row['recipe'] == 'bf16'
      self.assertEqual(row['mismatch_max'] == 0, is_bf16)
    self.assertEqual(
        list(self.curves['recipe']), [r['recipe'] for r in self.rows]
    )
    for name in sweep_lanes.METRICS:
      self.assertEqual(self.results[name].shape, (4, SMOKE.steps))
      self.assertTrue(np.isfinite(self.results[name]).all(), name)
    for name in ('reward', *sweep_lanes.ACCURACIES):
      np.testing.assert_array_equal(self.curves[name], self.results[name])
    np.testing.assert_array_equal(self.curves['evaluated_at'], [0, 2, 4])

  def test_table_has_differences_from_the_same_warm_start(self):
    bf16, naive = json.loads((self.workdir / 'table.json').read_text())
    self.assertNotIn('end_reward_difference', bf16)
    ends = np.reshape([row['end_reward'] for row in self.rows], (2, 2))
    gaps = ends[1] - ends[0]
    self.assertAlmostEqual(naive['end_reward'], ends[1].mean())
    self.assertAlmostEqual(naive['end_reward_difference'], gaps.mean())
    self.assertAlmostEqual(
        naive['end_reward_difference_interval'],
        12.706 * abs(gaps[1] - gaps[0]) / 2,
        places=4,
    )

  def test_figure_is_drawn(self):
    figure = self.workdir / 'figures' / 'recipe_sweep.png'
    self.assertEqual(figure.read_bytes()[:4], b'\x89PNG')

  def test_lane_is_the_run_of_experiments_grpo(self):
    i = 3  # nvfp4_naive, second warm start and seed: the mismatch is not 0
    cfg = grpo.Config(
        workdir=self.folder / 'grpo',
        recipe='nvfp4_naive',
        model=SMOKE.model,
        task=SMOKE.task,
        optimizer=SMOKE.optimizer,
        rollout=SMOKE.rollout,
        steps=SMOKE.steps,
        held_out=evaluation.EvalConfig(SMOKE.held_out),
        eval_interval=SMOKE.eval_interval,
        save_interval=0,
        diagnostics_interval=0,
        seed=int(self.curves['seed'][i]),
    )
    start = self.starts[self.curves['warm_start'][i]]
    log = run.Log(cfg.workdir)
    grpo.train(
        cfg, grpo.Start(SMOKE.model, start, SMOKE.task.make(), None), log
    )
    rows = run.read_rows(log.path)
    self.assertGreater(max(row['grad_norm'] for row in rows), 0)
    for name in sweep_lanes.METRICS:
      lane, alone = self.results[name][i], [row[name] for row in rows]
      # Here all are equal but one, in its last bit; see sweep_lanes.
      np.testing.assert_allclose(lane[:1], alone[:1], 1e-6, err_msg=name)
      np.testing.assert_allclose(lane, alone, 1e-4, err_msg=name)
    for name in sweep_lanes.ACCURACIES:
      alone = [row[name] for row in rows if name in row]
      np.testing.assert_array_equal(self.results[name][i], np.float32(alone))

  def test_lanes_sample_the_tokens_of_each_alone(self):
    quantizer = policy.Quantizer(recipes.get('nvfp4_naive').sampler)
    problems = sweep_lanes.problems(SMOKE.task.make(), 'train', (8,))
    masters = [
        transformer.stack(start, (SMOKE.model.num_layers,))
        for start in self.starts
    ]

    def generate(masters, key):
      return sampler.generate_at(
          SMOKE.model,
          policy.quantize_params(quantizer, masters),
          quantizer,
          problems.prompts,
          problems.lengths,
          key,
          jnp.float32(1.0),
          sampler.SampleConfig(3, (1,)),
      )

    keys = jax.random.split(jax.random.key(0), 2)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *masters)
    lanes = jax.jit(jax.vmap(generate))(stacked, keys)
    self.assertTrue((lanes.tokens[0] != lanes.tokens[1]).any())
    for i in range(2):
      alone = jax.jit(generate)(masters[i], keys[i])
      lane = jax.tree.map(lambda leaf, i=i: leaf[i], lanes)
      chex.assert_trees_all_equal(lane, alone)

  @parameterized.parameters(1, 3)
  def test_killed_sweep_goes_on_as_if_it_had_not_been(self, saves):
    workdir = self.folder / f'killed{saves}'
    save, count = sweep_start.save, 0

    def interrupted(path, arrays):
      nonlocal count
      save(path, arrays)
      count += 'partial' in path.name
      if count == saves:
        raise KeyboardInterrupt

    args = [
        'smoke',
        f'--workdir={workdir}',
        f'--warm_start_folder={self.workdir / "warm_starts"}',
    ]
    with (
        mock.patch.object(sweep_start, 'save', interrupted),
        self.assertRaises(KeyboardInterrupt),
    ):
      run.launch(recipe_sweep.main, recipe_sweep.PRESETS, args)
    self.assertLen(list(workdir.glob('groups/*.partial.npz')), 1)
    self.assertLen(list(workdir.glob('groups/*0.npz')), saves // 2)
    run.launch(
        recipe_sweep.main, recipe_sweep.PRESETS, ['resume', str(workdir)]
    )
    self.assertEmpty(list(workdir.glob('groups/*.partial.npz')))
    for name in FILES:
      self.assertEqual(
          (workdir / name).read_bytes(), (self.workdir / name).read_bytes()
      )
    curves = _arrays(workdir / 'curves.npz') | _results(workdir)
    for name, values in (self.curves | self.results).items():
      np.testing.assert_array_equal(curves[name], values, name)

  def test_groups_made_with_other_flags_are_refused(self):
    cfg = dataclasses.replace(self.cfg, high_learning_rate=1e-3)
    group, _ = recipe_sweep._groups(cfg)
    path = self.workdir / 'groups' / recipe_sweep._file(group)
    self.assertEqual(set(recipe_sweep._load(path, self.cfg, group)), ARRAYS)
    with self.assertRaisesRegex(ValueError, 'made with other flags'):
      recipe_sweep._load(path, cfg, group)

  def test_warm_starts_differ(self):
    first, second = (jax.tree.leaves(start) for start in self.starts)
    different = [np.any(a != b) for a, b in zip(first, second, strict=True)]
    self.assertTrue(all(different))


class RewardsTest(parameterized.TestCase):

  @parameterized.product(
      name=('running_sum', 'running_product', 'addition'), digits=(1, 3)
  )
  def test_rewards_are_those_of_the_task(self, name, digits):
    task = tasks.TaskConfig(name, digits=digits).make()
    count = 64
    problems = sweep_lanes.problems(task, 'held_out', (count,))
    rng = np.random.default_rng(0)
    tokens, mask = problems.tokens.copy(), problems.mask.copy()
    kinds = rng.integers(0, 5, count)
    for i, kind in enumerate(kinds):
      begin = problems.lengths[i]
      length = task.max_answer_tokens
      if kind == 1:  # EOS too early
        length = rng.integers(1, task.max_answer_tokens)
        tokens[i, begin + length - 1] = task.eos_ids[0]
      elif kind == 2:  # no EOS
        tokens[i, begin + length - 1] = rng.integers(2, task.vocab_size)
      elif kind == 3:  # one token is another
        at = begin + rng.integers(length)
        tokens[i, at] = (tokens[i, at] + rng.integers(1, 16)) % 16
      elif kind == 4:  # any tokens, padding among them
        tokens[i, begin:] = rng.integers(0, 2, tokens[i, begin:].size)
        length = rng.integers(1, length + 1)
      tokens[i, begin + length :] = sampler.PAD
      mask[i, begin + length :] = False
    completions = sampler.Completions(
        tokens=jnp.asarray(tokens),
        mask=jnp.asarray(mask),
        logprobs=jnp.zeros(mask.shape),
        truncated=jnp.zeros(count, bool),
        expert_ids=None,
    )
    want = [
        task.reward(task.problem('held_out', i), tokens[i, mask[i]].tolist())
        for i in range(count)
    ]
    np.testing.assert_array_equal(
        jax.jit(sweep_lanes.rewards)(completions, problems), want
    )
    self.assertBetween(sum(want), 1, count - 1)

  def test_problems_are_in_the_order_of_the_cursor(self):
    task = tasks.TaskConfig(digits=4).make()
    problems = sweep_lanes.problems(task, 'train', (2, 3))
    self.assertEqual(problems.prompts.shape, (2, 3, 8))
    prompt = task.problem('train', 5).prompt
    np.testing.assert_array_equal(problems.prompts[1, 2, : len(prompt)], prompt)


class SettingsTest(parameterized.TestCase):

  def test_outliers_keep_the_function(self):
    config = SMOKE.model
    params = transformer.init_params(jax.random.key(0), config)
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 16)
    bf16 = policy.Quantizer(policy.BF16)
    run_model = jax.jit(
        lambda params: transformer.logits(
            params, transformer.forward(config, params, tokens, bf16)
        )
    )
    stack = lambda params: transformer.stack(params, (config.num_layers,))
    plain = run_model(stack(params))
    # A power of two: the bits are the same.
    outliers = sweep_start.with_outliers(params, 8.0)
    np.testing.assert_array_equal(run_model(stack(outliers)), plain)
    for name, leaf in outliers['layers'][0].items():
      changed = not np.array_equal(leaf, params['layers'][0][name])
      reads = name.endswith(('layernorm', 'q_proj', 'k_proj', 'v_proj', 'gate'))
      reads |= name.endswith(('gate_proj', 'up_proj'))
      self.assertEqual(changed, reads, name)

  def test_settings_are_data(self):
    optimizers = {
        name: recipe_sweep.optimizer(SMOKE, name)
        for name in ('base', 'high_lr', 'no_clip', 'outliers')
    }
    structures = {jax.tree.structure(one) for one in optimizers.values()}
    self.assertLen(structures, 1)
    self.assertEqual(optimizers['base'], optimizers['outliers'])
    self.assertEqual(optimizers['no_clip'].grad_clip, math.inf)
    self.assertEqual(optimizers['no_clip'].learning_rate, 7.5e-4)

  def test_infinite_bound_does_not_clip(self):
    gradients = {'a': jnp.array([3e8, 4e8])}
    params = {'a': jnp.zeros(2)}
    for bound, clipped in ((math.inf, 5e8), (2.0, 2.0)):
      optimizer = learner.make_optimizer(
          learner.OptimizerConfig(grad_clip=jnp.float32(bound), b1=0.0)
      )
      _, state = optimizer.update(gradients, optimizer.init(params), params)
      norm = np.linalg.norm(state[1][0].mu['a'])
      np.testing.assert_allclose(norm, clipped, rtol=1e-6)

  def test_scope_all_adds_attention(self):
    model = recipe_sweep.Config().model
    paths = transformer.param_paths(model)
    for name, recipe in recipes.RECIPES.items():
      own = recipe_sweep.policies(recipe, 'experts')
      self.assertEqual(own, (recipe.learner, recipe.sampler))
      for before, after in zip(
          own, recipe_sweep.policies(recipe, 'all'), strict=True
      ):
        old, new = (policy.resolve(p, paths) for p in (before, after))
        for path in paths:
          if '.self_attn.' in path and path.endswith('_proj'):
            layer = path.split('.self_attn.')[0]
            self.assertEqual(new[path], new[f'{layer}.mlp.experts.gate_proj'])
          else:
            self.assertEqual(new[path], old[path])
        if name.startswith(('mxfp8', 'bf16')):
          self.assertEqual(before, after)

  def test_recipes_that_are_the_same_in_both_scopes_run_once(self):
    cfg = dataclasses.replace(SMOKE, scopes=('experts', 'all'))
    groups = list(recipe_sweep._groups(cfg))
    self.assertEqual(
        [group.labels for group in groups],
        [
            (('bf16', 'experts'), ('bf16', 'all')),
            (('nvfp4_naive', 'experts'),),
            (('nvfp4_naive', 'all'),),
        ],
    )

  def test_groups_have_one_size(self):
    cfg = dataclasses.replace(SMOKE, warm_starts=7, recipes=('bf16',), lanes=3)
    groups = list(recipe_sweep._groups(cfg))
    self.assertEqual([group.size for group in groups], [3, 3, 3])
    self.assertEqual([len(group.runs) for group in groups], [3, 3, 1])
    starts = [one.warm_start for group in groups for one in group.runs]
    self.assertEqual(starts, list(range(7)))

  @parameterized.parameters(
      (dict(recipes=('nvfp4_finale',)), 'is not one of'),
      (dict(steps=5), 'steps 5 is no multiple of chunk 2'),
      (dict(eval_interval=3), 'eval_interval 3 is no multiple'),
  )
  def test_flags_that_do_not_fit_are_refused(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      dataclasses.replace(SMOKE, **changes)

  def test_options_of_the_host_are_refused(self):
    rollout = dataclasses.replace(SMOKE.rollout, max_tries=2)
    cfg = dataclasses.replace(SMOKE, rollout=rollout)
    with self.assertRaisesRegex(ValueError, 'max_tries=2'):
      list(recipe_sweep._groups(cfg))


if __name__ == '__main__':
  absltest.main()
