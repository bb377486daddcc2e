//! User experts: code of the caller between moesaic's routing and combine.

use crate::call::{CallInput, Input, Output, RngKey, shape_for};
use crate::device_layer::{DeviceLayer, check_spec};
use crate::engine::Engine;
use crate::error::EngineError;
use crate::expert_ranks::{ExpertRanks, RowCounts, RowPass};
use crate::launch::{Bound, Scalars};
use crate::layer::{Layer, LayerOptions};
use crate::memory::Addresses;
use crate::mesh::Digested;
use crate::pass::Pass;
use crate::place::check_names;
use crate::reason::SpecReason;
use crate::texts::Texts;
use crate::training::DeviceSaved;
use crate::user_expert::{Held, UserExpert, run_backward, run_forward};
use moesaic_collectives::Call;
use moesaic_plan::{SATURATED, Step, TensorId};
use moesaic_spec::LayerSpec;
use moesaic_target::Buffer;
use moesaic_tensor::{Element, Tensor, WeightSource};
use std::fmt;
use std::ops::Range;

/// A layer whose routed experts are [`UserExpert`]s, of one type or boxed. Over ranks each holds
/// its own experts, whose rows come from all ranks; all ranks make every call. Gradients of the
/// router and of shared experts are those of this rank's tokens until
/// [`UserLayer::reduce_gradients`]. Routing, dispatch, shared experts and combine are kernels; rows
/// come to host memory in between.
pub struct UserLayer<E = Box<dyn UserExpert>> {
    layer: Layer,
    /// This rank's experts.
    experts: Vec<E>,
    /// The ranks with the others, if there are any.
    ranks: Option<ExpertRanks>,
    forward: Around,
    evaluation: Around,
    backward: Around,
}

impl<E> fmt::Debug for UserLayer<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Experts are the caller's, and need not have a `Debug`.
        f.debug_struct("UserLayer")
            .field("layer", &self.layer)
            .field("experts", &self.experts.len())
            .finish_non_exhaustive()
    }
}

/// The steps of a pass before the experts, and those after.
struct Around {
    before: Bound,
    after: Bound,
}

impl Around {
    fn new(layer: &DeviceLayer, steps: &[Step], at: usize) -> Result<Around, EngineError> {
        let (before, after) = steps.split_at(at);
        Ok(Around {
            before: layer.bind(before)?,
            after: layer.bind(after)?,
        })
    }
}

/// The state that a forward pass of a [`UserLayer`] keeps for backward.
pub struct UserSaved {
    saved: DeviceSaved,
    routed: Routed,
    held: Held,
}

impl fmt::Debug for UserSaved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UserSaved")
            .field("tokens", &self.saved.tokens())
            .finish_non_exhaustive()
    }
}

/// Rows of this rank's tokens, sorted by expert, in host memory.
struct Routed {
    /// The first row of each expert, and the number of all `[E + 1]`.
    offsets: Vec<usize>,
    /// `[R, d_out]`.
    out: Vec<f32>,
    /// The factor of each row on its way to the token `[R]`.
    weights: Vec<f32>,
    /// The rows of all ranks, if there are several.
    counts: RowCounts,
}

impl Engine {
    /// Makes a layer around `experts`. `moesaic::Engine` documents it.
    pub fn user_layer<E: UserExpert>(
        &self,
        spec: &LayerSpec,
        weights: &dyn WeightSource,
        experts: Vec<E>,
        options: LayerOptions<'_>,
    ) -> Result<UserLayer<E>, EngineError> {
        check_spec(spec)?;
        check_options(&options)?;
        check_names(spec, weights)?;
        let strategy = options.strategy.unwrap_or_default();
        let plan_options = self.plan_options(options.training);
        let plan = moesaic_plan::plan_user_experts(spec, self.target(), &plan_options)?;
        let ranks = options
            .mesh
            .map(|mesh| ExpertRanks::new(self, mesh, &plan.layer, strategy));
        let ranks = ranks.transpose()?;
        let expected = ranks.as_ref().map(ExpertRanks::count);
        check_experts(expected.unwrap_or(spec.shape.experts), experts.len())?;
        let texts = Texts::of(plan.layer.into())?;
        let layer = match options.mesh {
            None => self.device_layer(&texts, weights)?,
            // Every rank routes its own tokens, and rows of a token meet experts of all ranks: other
            // weights of the router would be another layer, and no error.
            Some(mesh) => {
                let everywhere = Digested::new(mesh, weights);
                let call = Call::new("kernels and weights of a layer");
                let layer =
                    mesh.with_heartbeat(&call, || self.device_layer(&texts, &everywhere))?;
                everywhere.compare(mesh)?;
                layer
            }
        };
        let around = |steps, at| Around::new(&layer, steps, at);
        let steps = layer.plan();
        Ok(UserLayer {
            forward: around(&steps.steps, plan.forward_at)?,
            evaluation: around(steps.evaluation_steps(), plan.evaluation_at)?,
            backward: around(&steps.backward, plan.backward_at)?,
            layer: match ranks {
                None => Layer::of_one(layer),
                Some(_) => Layer::of_one(layer).counting_saturated(),
            },
            experts,
            ranks,
        })
    }
}

fn check_experts(expected: usize, given: usize) -> Result<(), EngineError> {
    if given == expected {
        Ok(())
    } else {
        let reason = SpecReason::ExpertCount { given, expected };
        Err(EngineError::Spec(reason))
    }
}

/// Refuses options that a layer around experts in Rust would not follow.
fn check_options(options: &LayerOptions<'_>) -> Result<(), EngineError> {
    let refused = [
        (options.part, "a part of the weights"),
        (
            options.strategy.is_some() && options.mesh.is_none(),
            "a strategy without ranks",
        ),
        (options.tuner.is_some(), "a tuner of strategies"),
    ];
    match refused.iter().find(|(given, _)| *given) {
        Some((_, what)) => {
            let option = &what[2..];
            Err(EngineError::Spec(SpecReason::ExpertsOption { option }))
        }
        None => Ok(()),
    }
}

impl<E: UserExpert> UserLayer<E> {
    /// Returns the layer without its experts: gradients and weights of the router and of shared
    /// experts.
    pub fn layer(&self) -> &Layer {
        &self.layer
    }

    /// Returns the layer with its launches.
    fn device(&self) -> &DeviceLayer {
        let layer = self.layer.one("experts of yours");
        layer.expect("it is made of one process")
    }

    /// Returns the experts, by id.
    pub fn experts(&self) -> &[E] {
        &self.experts
    }

    /// Returns the experts, by id, for an optimizer that moves their parameters between calls.
    pub fn experts_mut(&mut self) -> &mut [E] {
        &mut self.experts
    }

    /// Evaluates the layer and returns the outputs that the call reads back.
    ///
    /// # Errors
    /// As [`Layer::forward`].
    pub fn forward<'i>(&self, input: impl Into<CallInput<'i>>) -> Result<Output, EngineError> {
        let (layer, pass) = (self.device(), Pass::Evaluate);
        let (input, names) = input.into().args(layer.plan())?.in_host_memory()?;
        // The plan knows nothing of ranks, so it would refuse the output that is theirs.
        let all = names;
        let names = &*self.of_layer(all);
        let mut workspaces = layer.lock_workspaces();
        // Names first: over ranks the scalars take the first exchange, and a rank that fails alone
        // must not leave the others in it.
        layer.check_outputs(pass, names)?;
        let scalars = self.scalars(pass, &input, RngKey::default())?;
        layer.reserve(&mut workspaces, input.tokens)?;
        layer.lay_passing(&mut workspaces);
        let find = |tensor| workspaces.get(tensor);
        layer.stage(pass, &input, names, find)?;
        let steps = &self.evaluation;
        self.run(steps, false, &scalars, &workspaces.addresses, find)?;
        self.with_saturated(layer.read(names, input.tokens, find)?, all)
    }

    /// Does the same as [`UserLayer::forward`], as in training, and keeps what backward needs.
    ///
    /// # Errors
    /// As [`Layer::forward_train`].
    pub fn forward_train<'i>(
        &self,
        input: impl Into<CallInput<'i>>,
        rng_key: RngKey,
    ) -> Result<(Output, UserSaved), EngineError> {
        let (layer, pass) = (self.device(), Pass::Train);
        let (input, names) = input.into().args(layer.plan())?.in_host_memory()?;
        layer.check_training()?;
        let all = names;
        let names = &*self.of_layer(all);
        let workspaces = &mut *layer.lock_workspaces();
        layer.check_outputs(pass, names)?;
        let scalars = self.scalars(pass, &input, rng_key)?;
        layer.reserve_training(&mut workspaces.every, input.tokens)?;
        let saved = layer.saved(input.tokens, scalars)?;
        layer.lay_saved(workspaces, &saved);
        let find = |tensor| saved.get(tensor).or_else(|| workspaces.every.get(tensor));
        layer.stage(pass, &input, names, find)?;
        let addresses = &workspaces.addresses;
        let (routed, held) = self.run(&self.forward, true, &scalars, addresses, find)?;
        let output = self.with_saturated(layer.read(names, input.tokens, find)?, all)?;
        let saved = UserSaved {
            saved,
            routed,
            held,
        };
        Ok((output, saved))
    }

    /// Returns the names that are tensors of the layer. [`SATURATED`] is the one output that belongs
    /// to ranks.
    fn of_layer<'n>(&self, names: &[&'n str]) -> Vec<&'n str> {
        let is_own = |name: &&str| self.ranks.is_none() || *name != SATURATED;
        names.iter().copied().filter(is_own).collect()
    }

    /// Adds [`SATURATED`] to the outputs of a pass, if it is among the names.
    fn with_saturated(&self, mut output: Output, names: &[&str]) -> Result<Output, EngineError> {
        if let Some(ranks) = self.ranks.as_ref().filter(|_| names.contains(&SATURATED)) {
            let saturated = ranks.saturated()?;
            output.tensors.insert(SATURATED.to_string(), saturated);
        }
        Ok(output)
    }

    /// Returns the scalars of a pass. Over ranks a capacity is that of the rank with the most
    /// tokens, and random numbers follow from a token's number among all.
    fn scalars(
        &self,
        pass: Pass,
        input: &Input<'_>,
        rng_key: RngKey,
    ) -> Result<Scalars, EngineError> {
        let (layer, factor) = (self.device(), input.capacity_factor);
        let Some(ranks) = &self.ranks else {
            return layer.scalars(pass, rng_key, input.tokens, factor);
        };
        let (count, before) = ranks.tokens(input.tokens)?;
        let rng_key = RngKey {
            first_token: rng_key.first_token + before,
            ..rng_key
        };
        layer.scalars_among(pass, rng_key, count, factor)
    }

    /// Runs the steps of a pass around the experts; returns the saved values if it trains.
    fn run<'b>(
        &self,
        steps: &Around,
        trains: bool,
        scalars: &Scalars,
        addresses: &Addresses,
        find: impl Fn(TensorId) -> Option<&'b Buffer> + Copy,
    ) -> Result<(Routed, Held), EngineError> {
        let layer = self.device();
        layer.run(&steps.before, scalars, addresses, None)?;
        let mut routed = self.routed(scalars.tokens(), find)?;
        let rows = self.download("rows", routed.weights.len(), find)?;
        let mut held = Held {
            offsets: self.held_offsets(&mut routed)?,
            ..Held::default()
        };
        let pass = self.row_pass(false);
        // An evaluation keeps nothing: rows of a chunk are freed when its experts have run.
        let (of, counts) = ((self.ranks.as_ref(), self.experts.len()), &routed.counts);
        routed.out = through_experts(of, pass, counts, rows, |range, rows| {
            let edges = &held.offsets[range.start..=range.end];
            let experts = &self.experts[range];
            let (out, saved) = run_forward(experts, edges, &rows, pass.widths, trains);
            if trains {
                held.keep(rows, saved);
            }
            out
        })?;
        self.upload("out", &routed.out, find)?;
        layer.run(&steps.after, scalars, addresses, None)?;
        Ok((routed, held))
    }

    /// Returns the widths of rows in a pass.
    fn row_pass(&self, backward: bool) -> RowPass {
        let spec = self.device().spec();
        let mut widths = [spec.expert_input_dim(), spec.expert_output_dim()];
        // Backward a row goes to the experts as a gradient of what they gave.
        if backward {
            widths.reverse();
        }
        RowPass { backward, widths }
    }

    /// Returns the first row of each of this rank's experts, and the number of all.
    fn held_offsets(&self, routed: &mut Routed) -> Result<Vec<usize>, EngineError> {
        let Some(ranks) = &self.ranks else {
            return Ok(routed.offsets.clone());
        };
        routed.counts = ranks.counts(&routed.offsets)?;
        Ok(ranks.offsets(&routed.counts))
    }

    /// Runs the layer backward: as [`Layer::backward`], and each expert's own.
    ///
    /// # Errors
    /// As [`Layer::backward`].
    pub fn backward(
        &mut self,
        saved: &UserSaved,
        dy: &Tensor<'_>,
        accumulate: bool,
    ) -> Result<Output, EngineError> {
        let (layer, tokens) = (self.layer.one("experts of yours")?, saved.saved.tokens());
        let workspaces = &mut *layer.lock_workspaces();
        layer.check_saved(&saved.saved)?;
        layer.check_dy(tokens, dy)?;
        layer.reserve_every(&mut workspaces.every, tokens)?;
        layer.gradient_buffers()?;
        layer.lay_saved(workspaces, &saved.saved);
        let (kept, addresses) = (&saved.saved, &workspaces.addresses);
        let find = |tensor| kept.get(tensor).or_else(|| workspaces.every.get(tensor));
        let staged = layer.id("dy").and_then(find).expect("reserved above");
        layer.device.upload(&dy.data, staged, 0)?;
        let scalars = saved.saved.scalars().accumulating(accumulate);
        let Around { before, after } = &self.backward;
        layer.run(before, &scalars, addresses, None)?;
        let rows = saved.routed.weights.len();
        let dout = self.download("dout", rows, find)?;
        // With the factor of each row: the weights of tokens stay with their rank.
        let weighted = weighted(&dout, &saved.routed.weights);
        let (pass, counts) = (self.row_pass(true), &saved.routed.counts);
        let of = (self.ranks.as_ref(), self.experts.len());
        let (held, experts) = (&saved.held, &mut self.experts);
        let drows = through_experts(of, pass, counts, weighted, |range, dout| {
            let first = range.start;
            run_backward(
                &mut experts[range],
                held,
                first,
                &dout,
                pass.widths,
                accumulate,
            )
        })?;
        self.upload("drows", &drows, find)?;
        self.upload_weight_gradients(&saved.routed, &dout, find)?;
        layer.run(after, &scalars, addresses, None)?;
        let output = layer.read(&layer.input_gradients(), tokens, find)?;
        let counts = self
            .ranks
            .as_ref()
            .is_some_and(ExpertRanks::counts_backward);
        self.with_saturated(output, if counts { &[SATURATED] } else { &[] })
    }

    /// Sums the gradients of router and shared experts over all ranks, and those of your experts
    /// ([`UserExpert::gradients`]) over the `dp` groups, each of which has a copy; does nothing
    /// without ranks.
    ///
    /// # Errors
    /// [`EngineError::NotTraining`], [`EngineError::Collective`].
    pub fn reduce_gradients(&mut self) -> Result<(), EngineError> {
        let layer = self.device();
        layer.check_training()?;
        let Some(ranks) = &self.ranks else {
            return Ok(());
        };
        ranks.sum_gradients(layer)?;
        let gradients = self.experts.iter_mut().flat_map(UserExpert::gradients);
        ranks.sum_over_copies(&mut gradients.collect::<Vec<_>>())
    }

    /// Downloads the rows that dispatch wrote and the factors that combine will use.
    fn routed<'b>(
        &self,
        tokens: usize,
        find: impl Fn(TensorId) -> Option<&'b Buffer>,
    ) -> Result<Routed, EngineError> {
        let spec = self.device().spec();
        let offsets: Vec<i64> = self.read_raw("offsets", spec.shape.experts + 1, &find)?;
        let offsets: Vec<usize> = offsets.into_iter().map(|offset| offset as usize).collect();
        let rows = offsets.last().copied().unwrap_or(0);
        // Weights on the input are in `rows` already, and behind a norm of outputs they are in
        // `dout`, so the expert's factor is 1 there.
        let weights = if spec.weighs_gemms() && rows > 0 {
            let slots: Vec<i32> = self.read_raw("row_slots", rows, &find)?;
            let all: Vec<f32> = self.read_raw("topk_weights", tokens * spec.shape.top_k, &find)?;
            slots.into_iter().map(|slot| all[slot as usize]).collect()
        } else {
            vec![1.0; rows]
        };
        Ok(Routed {
            out: Vec::new(),
            weights,
            offsets,
            counts: RowCounts::new(),
        })
    }

    /// Uploads gradients of row weights, `<dout, out>` of each row: one column of the partial sums,
    /// the others zero.
    fn upload_weight_gradients<'b>(
        &self,
        routed: &Routed,
        dout: &[f32],
        find: impl Fn(TensorId) -> Option<&'b Buffer>,
    ) -> Result<(), EngineError> {
        let Some(plan) = self.device().plan().tensor("dweight_parts") else {
            return Ok(());
        };
        let parts = shape_for(plan, 0)[1];
        let width = self.device().spec().expert_output_dim();
        let mut values = vec![0.0; routed.weights.len() * parts];
        for (row, part) in values.chunks_exact_mut(parts.max(1)).enumerate() {
            let range = row * width..(row + 1) * width;
            let pairs = dout[range.clone()].iter().zip(&routed.out[range]);
            // Kernels leave one partial sum for each tile of columns, and the next launch adds them
            // up; the host has the whole sum.
            part[0] = pairs.map(|(a, b)| a * b).sum();
        }
        self.upload("dweight_parts", &values, find)
    }

    /// Downloads the first rows of a tensor as f32.
    fn download<'b>(
        &self,
        name: &str,
        rows: usize,
        find: impl Fn(TensorId) -> Option<&'b Buffer>,
    ) -> Result<Vec<f32>, EngineError> {
        let id = self.device().id(name).expect("planned");
        let plan = &self.device().plan()[id];
        let width = shape_for(plan, 0)[1];
        let mut host = Tensor::zeros(plan.dtype, &[rows, width]);
        let buffer = find(id).expect("planned tensors have memory");
        self.device()
            .device
            .download(buffer, 0, host.data.to_mut())?;
        Ok(host.to_f32())
    }

    /// Downloads elements of a tensor as they are.
    fn read_raw<'b, T: Element>(
        &self,
        name: &str,
        count: usize,
        find: impl Fn(TensorId) -> Option<&'b Buffer>,
    ) -> Result<Vec<T>, EngineError> {
        let mut values = vec![T::zeroed(); count];
        let id = self.device().id(name);
        let buffer = id.and_then(find).expect("planned tensors have memory");
        let bytes = bytemuck::cast_slice_mut(&mut values);
        self.device().device.download(buffer, 0, bytes)?;
        Ok(values)
    }

    /// Uploads the first rows of a tensor, rounded to its dtype.
    fn upload<'b>(
        &self,
        name: &str,
        values: &[f32],
        find: impl Fn(TensorId) -> Option<&'b Buffer>,
    ) -> Result<(), EngineError> {
        let id = self.device().id(name);
        let Some((tensor, buffer)) = id.and_then(|id| Some((id, find(id)?))) else {
            return Ok(());
        };
        let dtype = self.device().plan()[tensor].dtype;
        let host = Tensor::rounded(dtype, &[values.len()], values);
        self.device().device.upload(&host.data, buffer, 0)?;
        Ok(())
    }
}

/// Returns the gradients of rows times their factors. A copy, because the gradient of a factor is
/// `<dout, out>` with the `dout` that is not weighted yet.
fn weighted(dout: &[f32], weights: &[f32]) -> Vec<f32> {
    let mut weighted = dout.to_vec();
    let width = dout.len() / weights.len().max(1);
    for (row, weight) in weighted.chunks_exact_mut(width.max(1)).zip(weights) {
        row.iter_mut().for_each(|g| *g *= weight);
    }
    weighted
}

/// Sends rows through `compute`, over ranks if there are several, and returns the results in the
/// order of the rows. `compute` gets ranges of this rank's experts in order, with their rows.
fn through_experts(
    (ranks, experts): (Option<&ExpertRanks>, usize),
    pass: RowPass,
    counts: &RowCounts,
    rows: Vec<f32>,
    mut compute: impl FnMut(Range<usize>, Vec<f32>) -> Vec<f32>,
) -> Result<Vec<f32>, EngineError> {
    match ranks {
        Some(ranks) => ranks.through_experts(pass, counts, &rows, compute),
        None => Ok(compute(0..experts, rows)),
    }
}
