//! Experts behind several routers, in one pass over their weights.
//!
//! Each router decides by itself. Then the tokens of all are one call of a layer
//! that is told where tokens go: token `t` of router `g` is its token `g · stride + t`,
//! and what that layer has of a router's tokens is a slice, which the router's
//! own launches write and read in place. Backward goes the same way back.
//!
//! Where every token visits every expert whatever its router says (`top_k` is
//! the number of experts, as in MMoE), evaluation goes further: experts see each
//! token once, and each router only sums what they gave.

use crate::launch::Scalars;
use crate::pass::Pass;
use crate::workspace::Workspace;
use crate::{Counters, EngineError, Input, Layer, Output, Saved};
use moesaic_kernel::Size;
use moesaic_plan::{Role, Step};
use moesaic_spec::{LayerSpec, Select, WeightSite};
use moesaic_target::{Buffer, Ptr};
use moesaic_tensor::Tensor;
use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard};

/// What a router has in the stack before the experts run.
const DECIDED: [&str; 3] = ["x", "topk_ids", "topk_weights"];

/// What else it has there on the way back, beside tensors of shared experts.
const BACK: [&str; 6] = [
    "slot_rows",
    "grad.topk_weights",
    "drows",
    "dy",
    "drouted",
    "dx",
];

/// Routers' tokens begin at multiples of this: 16 bytes at least, in any type.
const ALIGN: usize = 8;

/// Where a tensor lies: memory, and its first byte there.
type Place<'a> = Option<(&'a Buffer, usize)>;

/// The experts, and the launches that are not a whole layer's.
pub(crate) struct Stack {
    experts: Layer,
    once: bool,
    /// An evaluation without the last launches, and these, which are a router's.
    up_to_out: Vec<Step>,
    combine: Vec<Step>,
    experts_backward: Vec<Step>,
    router_backward: Vec<Step>,
    /// Memory for one router's decision, and for its way back.
    deciding: Mutex<Workspace>,
    returning: Mutex<Workspace>,
}

/// What one forward pass left for backward.
pub(crate) struct StackSaved {
    tokens: usize,
    experts: Saved,
    routers: Vec<(Workspace, Scalars)>,
}

impl Stack {
    /// Of layers like `router`, and of the layer of [`moesaic_plan::stacked`] over
    /// the same experts.
    pub fn new(router: &Layer, experts: Layer) -> Stack {
        let (plan, experts_plan) = (router.plan(), experts.plan());
        Stack {
            once: sees_all(&plan.spec),
            up_to_out: experts_plan.combine_steps(experts_plan.evaluation_steps(), false),
            combine: plan.combine_steps(plan.evaluation_steps(), true),
            experts_backward: experts_plan.experts_backward(),
            router_backward: plan.router_backward(),
            experts,
            deciding: Mutex::default(),
            returning: Mutex::default(),
        }
    }

    /// Evaluates the layer of every router.
    pub fn forward(
        &self,
        routers: &[Layer],
        input: &Input<'_>,
        names: &[&str],
    ) -> Result<Vec<Output>, EngineError> {
        routers[0].check_outputs(Pass::Evaluate, names)?;
        match self.once {
            true => self.forward_once(routers, input, names),
            false => self.forward_stacked(routers, input, names),
        }
    }

    fn forward_stacked(
        &self,
        routers: &[Layer],
        input: &Input<'_>,
        names: &[&str],
    ) -> Result<Vec<Output>, EngineError> {
        let (stride, total) = sizes(routers, input.tokens);
        let mut workspaces = self.experts.lock_workspaces();
        let scalars = self.scalars(Pass::Evaluate, total)?;
        self.experts.reserve(&mut workspaces, total)?;
        let find = |name: &str| workspaces.get(name);
        self.stage(&routers[0], input, [stride, routers.len()], find)?;
        let plan = routers[0].plan();
        let steps = plan.router_steps(plan.evaluation_steps());
        let mut own = lock(&self.deciding);
        reserve(&mut own, &routers[0], steps, input.tokens, |name| {
            DECIDED.contains(&name)
        })?;
        let mut outputs = Vec::new();
        for (index, router) in routers.iter().enumerate() {
            let place = |name: &str| match DECIDED.contains(&name) {
                true => self.slice(name, index * stride, find),
                false => Some((own.get(name)?, 0)),
            };
            let call = (Pass::Evaluate, Counters::default());
            outputs.push(decide(router, call, input, names, place)?.0);
        }
        let steps = self.experts.plan().evaluation_steps();
        self.experts
            .run(steps, &scalars, |name| ptr((find(name)?, 0)), None)?;
        self.read_y(&mut outputs, names, [stride, input.tokens], find)?;
        Ok(outputs)
    }

    /// As [`Stack::forward_stacked`], where every token visits every expert.
    fn forward_once(
        &self,
        routers: &[Layer],
        input: &Input<'_>,
        names: &[&str],
    ) -> Result<Vec<Output>, EngineError> {
        let (experts, tokens) = (&self.experts, input.tokens);
        let mut workspaces = experts.lock_workspaces();
        let scalars = self.scalars(Pass::Evaluate, tokens)?;
        experts.reserve(&mut workspaces, tokens)?;
        let find = |name: &str| workspaces.get(name);
        self.stage(&routers[0], input, [tokens, 1], find)?;
        let count = experts.spec().shape.experts;
        let all: Vec<i32> = (0..tokens).flat_map(|_| 0..count as i32).collect();
        self.fill("topk_ids", bytemuck::cast_slice(&all), find)?;
        self.fill(
            "topk_weights",
            bytemuck::cast_slice(&vec![1f32; all.len()]),
            find,
        )?;
        experts.run(
            &self.up_to_out,
            &scalars,
            |name| ptr((find(name)?, 0)),
            None,
        )?;
        let rows = experts.read(&["slot_rows"], tokens, find)?;
        let rows: Vec<i32> = rows.tensors["slot_rows"].to_vec().expect("rows are i32");

        let plan = routers[0].plan();
        let steps = plan.router_steps(plan.evaluation_steps());
        let steps = [steps, &self.combine].concat();
        let of_experts = |name: &str| ["x", "out"].contains(&name) || name.starts_with("shared.");
        let mut own = lock(&self.deciding);
        reserve(&mut own, &routers[0], &steps, tokens, of_experts)?;
        let place = |name: &str| match of_experts(name) {
            true => Some((find(name)?, 0)),
            false => Some((own.get(name)?, 0)),
        };
        let mut outputs = Vec::new();
        for router in routers {
            let call = (Pass::Evaluate, Counters::default());
            let (mut output, scalars) = decide(router, call, input, names, place)?;
            let ids = router.read(&["topk_ids"], tokens, |name| own.get(name))?;
            let ids: Vec<i32> = ids.tensors["topk_ids"].to_vec().expect("ids are i32");
            let of_token = rows.chunks(count).zip(ids.chunks(count));
            let found = of_token.flat_map(|(rows, ids)| ids.iter().map(|&id| rows[id as usize]));
            let found: Vec<i32> = found.collect();
            let (slot_rows, _) = place("slot_rows").expect("reserved above");
            experts
                .device
                .upload(bytemuck::cast_slice(&found), slot_rows, 0)?;
            router.run(&self.combine, &scalars, |name| ptr(place(name)?), None)?;
            if names.contains(&"y") {
                let y = router.read(&["y"], tokens, |name| own.get(name))?;
                output.tensors.extend(y.tensors);
            }
            outputs.push(output);
        }
        Ok(outputs)
    }

    /// As [`Layer::forward_train`], of every router's layer.
    pub fn forward_train(
        &self,
        routers: &[Layer],
        input: &Input<'_>,
        names: &[&str],
        counters: Counters,
    ) -> Result<(Vec<Output>, StackSaved), EngineError> {
        routers[0].check_outputs(Pass::Train, names)?;
        let (tokens, plan) = (input.tokens, routers[0].plan());
        let (stride, total) = sizes(routers, tokens);
        let every = &mut self.experts.lock_workspaces().every;
        let scalars = self.scalars(Pass::Train, total)?;
        self.experts.reserve_training(every, total)?;
        let experts = self.experts.saved(total, scalars)?;
        let find = |name: &str| experts.kept.get(name).or_else(|| every.get(name));
        self.stage(&routers[0], input, [stride, routers.len()], find)?;
        let steps = plan.router_steps(&plan.steps);
        let (mut outputs, mut kept) = (Vec::new(), Vec::new());
        for (index, router) in routers.iter().enumerate() {
            let mut own = Workspace::default();
            reserve(&mut own, router, steps, tokens, |name| {
                DECIDED.contains(&name)
            })?;
            let place = |name: &str| match DECIDED.contains(&name) {
                true => self.slice(name, index * stride, find),
                false => Some((own.get(name)?, 0)),
            };
            let call = (Pass::Train, counters);
            let (output, scalars) = decide(router, call, input, names, place)?;
            outputs.push(output);
            kept.push((own, scalars));
        }
        let steps = &self.experts.plan().steps;
        self.experts
            .run(steps, &scalars, |name| ptr((find(name)?, 0)), None)?;
        self.read_y(&mut outputs, names, [stride, tokens], find)?;
        let saved = StackSaved {
            tokens,
            experts,
            routers: kept,
        };
        Ok((outputs, saved))
    }

    /// As [`Layer::backward`], of every router's layer. Gradients of experts
    /// are the sum over the routers.
    pub fn backward(
        &self,
        routers: &[Layer],
        saved: &StackSaved,
        dy: &[Tensor<'_>],
        accumulate: bool,
    ) -> Result<Vec<Output>, EngineError> {
        self.experts.check_saved(&saved.experts)?;
        let (stride, total) = sizes(routers, saved.tokens);
        let every = &mut self.experts.lock_workspaces().every;
        every.reserve(&self.experts.tilings, &*self.experts.device, total as u64)?;
        self.experts.gradient_buffers()?;
        let kept = &saved.experts.kept;
        let find = |name: &str| kept.get(name).or_else(|| every.get(name));
        for (router, dy) in routers.iter().zip(dy) {
            router.check_dy(saved.tokens, dy)?;
        }
        let row = self
            .experts
            .plan()
            .tensor("dy")
            .expect("training plans have dy");
        let each = dy.iter().map(|dy| &*dy.data);
        self.fill("dy", &padded(each, row.bytes(stride as u64) as usize), find)?;
        let scalars = saved.experts.scalars().accumulating(accumulate);
        let steps = &self.experts_backward;
        self.experts
            .run(steps, &scalars, |name| ptr((find(name)?, 0)), None)?;

        let mut outputs = Vec::new();
        let calls = routers.iter().zip(&saved.routers).enumerate();
        for (index, (router, (own, scalars))) in calls {
            router.gradient_buffers()?;
            let mut returning = lock(&self.returning);
            let elsewhere = |name: &str| of_experts(name) || own.get(name).is_some();
            reserve(
                &mut returning,
                router,
                &self.router_backward,
                saved.tokens,
                elsewhere,
            )?;
            let place = |name: &str| match of_experts(name) {
                true => self.slice(name, index * stride, find),
                false => Some((own.get(name).or_else(|| returning.get(name))?, 0)),
            };
            let scalars = scalars.accumulating(accumulate);
            router.run(
                &self.router_backward,
                &scalars,
                |name| ptr(place(name)?),
                None,
            )?;
            let mut output = Output::default();
            for name in router.input_gradients() {
                let lies = place(name).expect("backward wrote it");
                let host = router.read_at(name, saved.tokens, lies)?;
                output.tensors.insert(name.to_string(), host);
            }
            outputs.push(output);
        }
        Ok(outputs)
    }

    /// The stack's scalars: it draws nothing.
    fn scalars(&self, pass: Pass, tokens: usize) -> Result<Scalars, EngineError> {
        let counters = Counters::default();
        self.experts.scalars(pass, counters, tokens, None)
    }

    /// Puts the tokens of a call into the stack, once for each of so many routers
    /// and with nothing between them: zeros that go to no expert.
    fn stage<'b>(
        &self,
        router: &Layer,
        input: &Input<'_>,
        [stride, routers]: [usize; 2],
        find: impl Fn(&str) -> Option<&'b Buffer>,
    ) -> Result<(), EngineError> {
        let tensor = router.plan().tensor("x").expect("a layer has tokens");
        let x = router.checked_input(input, tensor)?;
        let bytes = tensor.bytes(stride as u64) as usize;
        self.fill(
            "x",
            &padded(std::iter::repeat_n(&*x.data, routers), bytes),
            &find,
        )?;
        if stride > input.tokens {
            let slots = stride * routers * router.spec().shape.top_k;
            self.fill("topk_ids", bytemuck::cast_slice(&vec![-1i32; slots]), &find)?;
            self.fill(
                "topk_weights",
                bytemuck::cast_slice(&vec![0f32; slots]),
                &find,
            )?;
        }
        Ok(())
    }

    fn fill<'b>(
        &self,
        name: &str,
        bytes: &[u8],
        find: impl Fn(&str) -> Option<&'b Buffer>,
    ) -> Result<(), EngineError> {
        let buffer = find(name).expect("the stack has it");
        Ok(self.experts.device.upload(bytes, buffer, 0)?)
    }

    /// The part of a stack's tensor that is of the router whose first token this
    /// is; all of one that has no rows of tokens.
    fn slice<'b>(
        &self,
        name: &str,
        first: usize,
        find: impl Fn(&str) -> Option<&'b Buffer>,
    ) -> Place<'b> {
        let tensor = self.experts.plan().tensor(name)?;
        let first = match tensor.shape.first() {
            Some(Size::Tokens) => tensor.bytes(first as u64) as usize,
            _ => 0,
        };
        Some((find(name)?, first))
    }

    /// Adds `y` to what routers gave, where it is wanted.
    fn read_y<'b>(
        &self,
        outputs: &mut [Output],
        names: &[&str],
        [stride, tokens]: [usize; 2],
        find: impl Fn(&str) -> Option<&'b Buffer>,
    ) -> Result<(), EngineError> {
        if !names.contains(&"y") {
            return Ok(());
        }
        for (index, output) in outputs.iter_mut().enumerate() {
            let lies = self.slice("y", index * stride, &find);
            let y = self.experts.read_at("y", tokens, lies.expect("reserved"))?;
            output.tensors.insert("y".to_string(), y);
        }
        Ok(())
    }
}

/// One router's decision: its launches, and what is read of them.
fn decide<'b>(
    router: &Layer,
    (pass, counters): (Pass, Counters),
    input: &Input<'_>,
    names: &[&str],
    place: impl Fn(&str) -> Place<'b>,
) -> Result<(Output, Scalars), EngineError> {
    let tokens = input.tokens;
    let scalars = router.scalars(pass, counters, tokens, input.capacity_factor)?;
    for tensor in router
        .inputs_or_named(pass, names)
        .filter(|tensor| tensor.name != "x")
    {
        let host = router.checked_input(input, tensor)?;
        let (buffer, first) = place(&tensor.name).expect("inputs have memory");
        router.device.upload(&host.data, buffer, first)?;
    }
    let steps = router.plan().router_steps(pass.steps(router.plan()));
    router.run(steps, &scalars, |name| ptr(place(name)?), None)?;
    let mut output = Output::default();
    for name in names.iter().filter(|name| **name != "y") {
        let lies = place(name).expect("outputs have memory");
        let host = router.read_at(name, tokens, lies)?;
        output.tensors.insert(name.to_string(), host);
    }
    Ok((output, scalars))
}

/// Makes room for what these launches name, unless it lies elsewhere or outlives
/// the call.
fn reserve(
    own: &mut Workspace,
    router: &Layer,
    steps: &[Step],
    tokens: usize,
    elsewhere: impl Fn(&str) -> bool,
) -> Result<(), EngineError> {
    let plan = router.plan();
    let named: BTreeSet<&str> = steps.iter().flat_map(|step| plan.names(step)).collect();
    let passes = |name: &&str| {
        let role = plan.tensor(name).map(|tensor| tensor.role);
        !matches!(
            role,
            Some(Role::Weight | Role::Packed | Role::WeightGradient)
        )
    };
    let names = named
        .into_iter()
        .filter(passes)
        .filter(|name| !elsewhere(name));
    own.reserve_for(names, &router.tilings, &*router.device, tokens as u64)?;
    Ok(())
}

/// Whether a tensor of the way back is the stack's.
fn of_experts(name: &str) -> bool {
    DECIDED.contains(&name) || BACK.contains(&name) || name.starts_with("shared.")
}

/// Tokens from one router to the next, and of all.
fn sizes(routers: &[Layer], tokens: usize) -> (usize, usize) {
    let stride = tokens.next_multiple_of(ALIGN);
    (stride, stride * routers.len())
}

/// Parts one behind another, each followed by zeros up to so many bytes.
fn padded<'a>(parts: impl Iterator<Item = &'a [u8]>, bytes: usize) -> Vec<u8> {
    let mut all = Vec::new();
    for (index, part) in parts.enumerate() {
        all.extend_from_slice(part);
        all.resize((index + 1) * bytes, 0);
    }
    all
}

/// Whether every expert sees every token whatever the router says, and what it
/// gives does not depend on that either.
fn sees_all(spec: &LayerSpec) -> bool {
    let router = &spec.router;
    spec.shape.top_k == spec.routed_experts()
        && spec.experts.identity + spec.experts.zero == 0
        && router.weight_on == WeightSite::Output
        && !matches!(router.select, Select::ExpertChoice(_))
        && !router.token_mask
        && !router.active_k
}

fn ptr((buffer, first): (&Buffer, usize)) -> Option<Ptr> {
    Some(Ptr(buffer.ptr().0 + first as u64))
}

fn lock(workspace: &Mutex<Workspace>) -> MutexGuard<'_, Workspace> {
    let locked = workspace.lock();
    locked.unwrap_or_else(|poisoned| poisoned.into_inner())
}
