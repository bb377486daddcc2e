//! Casts of rows to [`CommDtype`] between nodes.
//!
//! ```text
//! comm_cast_pack    rows of this rank that go to other nodes    rows to bytes
//! exchange     those, and as they are the rows that stay on the node
//! comm_cast_unpack  rows received from other nodes             bytes to rows
//! ```
//!
//! Rows of tokens and rows of gradients are cast, with a dtype for forward and one for backward.
//! Weights of rows and the parts of their gradients are few, so they travel as they are. Sums are
//! always made of rows in their own dtype, never of cast ones.

use super::data::{CastLane, Exchange, Packed, PartTensor, RankPlan, RankStep};
use crate::ops::CommCastDesc;
use crate::{EntryId, KernelPlan, LaunchStep, LayerPlan, Operator, Step, TensorRole, TileMachine};
use crate::{TensorId, TensorPlan};
use moesaic_dist::{Both, CommDtype};
use moesaic_kernel::DType::{self, I32, I64};
use moesaic_kernel::Size;

/// The output with the number of values, of all that this rank cast in a call, that were too large
/// for the dtype: `[1]`, i64.
pub const SATURATED: &str = "comm_cast.saturated";

impl RankPlan {
    /// Returns the same passes with rows cast to `comm_dtype` where they go to other nodes. Rows
    /// that have the dtype already stay as they are.
    #[must_use]
    pub fn in_comm_dtype(&self, comm_dtype: Both<CommDtype>) -> RankPlan {
        let mut between = CastPlan::of(&self.tokens);
        let mut pass = |steps: &[RankStep], comm_dtype| {
            let steps = steps.iter().map(|step| match step {
                RankStep::Exchange(exchange) => RankStep::Exchange(Exchange {
                    packed: between.packed(self, exchange, comm_dtype),
                    ..exchange.clone()
                }),
                RankStep::Launch { .. } => step.clone(),
            });
            steps.collect::<Vec<_>>()
        };
        let steps = pass(&self.steps, comm_dtype.forward);
        let evaluation = pass(&self.evaluation, comm_dtype.forward);
        let backward = pass(&self.backward, comm_dtype.backward);
        RankPlan {
            steps,
            evaluation,
            backward,
            comm_cast: between.kernels(),
            ..self.clone()
        }
    }
}

/// The casts of rows that a caller exchanges itself, such as those of experts in Rust.
#[derive(Clone, Debug)]
pub struct RowCasts {
    /// The cast kernels; `None` where no row is cast.
    pub kernels: Option<LayerPlan>,
    /// The cast of each kind of rows; `None` for rows that travel as they are.
    pub packed: Vec<Option<Packed>>,
}

/// Rows of one kind that a caller exchanges itself.
#[derive(Clone, Copy, Debug)]
pub struct CastRows {
    /// A name for kernels and tensors: `rows`.
    pub name: &'static str,
    /// The dtype of rows in memory.
    pub dtype: DType,
    /// Values of a row.
    pub width: usize,
    /// The dtype of rows between nodes.
    pub comm_dtype: CommDtype,
}

impl RowCasts {
    /// Plans the casts of some kinds of rows for the machine of a layer's plan.
    pub fn new(layer: &LayerPlan, rows: &[CastRows]) -> RowCasts {
        let mut casts = CastPlan::of(layer);
        let packed = rows.iter().map(|rows| casts.of_rows(rows)).collect();
        RowCasts {
            packed,
            kernels: casts.kernels(),
        }
    }
}

/// The cast kernels, as they are collected.
struct CastPlan {
    plan: LayerPlan,
    known: Vec<(CommCastDesc, Packed)>,
}

impl CastPlan {
    fn of(plan: &LayerPlan) -> CastPlan {
        CastPlan {
            plan: LayerPlan {
                kernels: Vec::new(),
                tensors: Vec::new(),
                prepare: Vec::new(),
                steps: Vec::new(),
                evaluation: Vec::new(),
                training: None,
                backward: Vec::new(),
                ..plan.clone()
            },
            known: Vec::new(),
        }
    }

    /// Returns the kernels, if there are any.
    fn kernels(self) -> Option<LayerPlan> {
        (!self.plan.kernels.is_empty()).then_some(self.plan)
    }

    /// Returns the cast of an exchange's rows; `None` where they travel as they are.
    fn packed(
        &mut self,
        plan: &RankPlan,
        exchange: &Exchange,
        comm_dtype: CommDtype,
    ) -> Option<Packed> {
        exchange.payload.filter(|payload| payload.is_castable())?;
        let PartTensor { part, tensor } = exchange.reads()?;
        let dtype = plan.part(part)[tensor].dtype;
        let width = plan.row_bytes(part, tensor) / dtype.size();
        self.of_kind(&exchange.name, dtype, width, comm_dtype)
    }

    fn of_rows(&mut self, rows: &CastRows) -> Option<Packed> {
        self.of_kind(rows.name, rows.dtype, rows.width, rows.comm_dtype)
    }

    /// Returns the cast of rows, adding its kernel if they are the first of their kind; `None`
    /// where they travel as they are.
    fn of_kind(
        &mut self,
        name: &str,
        rows: DType,
        width: usize,
        comm_dtype: CommDtype,
    ) -> Option<Packed> {
        if comm_dtype.row().keeps(rows) {
            return None;
        }
        let desc = CommCastDesc {
            comm_dtype,
            width,
            rows,
        };
        // Rows of one width and dtype share a kernel: `rows` with `drows`, and `out` with `dout`,
        // where both passes have one communication dtype.
        let known = self.known.iter().find(|(known, _)| *known == desc);
        Some(match known {
            Some((_, packed)) => packed.clone(),
            None => self.add(name, desc),
        })
    }

    /// Adds the kernel for one kind of rows, named after the first exchange that uses it.
    fn add(&mut self, name: &str, desc: CommCastDesc) -> Packed {
        let machine = TileMachine::of(self.plan.target, self.plan.caches);
        let config = desc.tiling(machine);
        let (width, words) = (desc.width as u64, desc.row_bytes() as u64 / 4);
        let rows = self.tensor(
            name,
            "rows",
            desc.rows,
            &[Size::Tokens, width.into()],
            TensorRole::Input,
        );
        let mut lane = |bytes: &str, places: &str| CastLane {
            bytes: self.tensor(
                name,
                bytes,
                I32,
                &[Size::Tokens, words.into()],
                TensorRole::Scratch,
            ),
            places: self.tensor(name, places, I32, &[Size::Tokens], TensorRole::Input),
        };
        let (sent, received) = (lane("sent", "sent_places"), lane("received", "came_places"));
        let kernel = self.plan.kernels.len();
        let entries = desc.entries(&config).into_iter();
        let entries = entries.map(|entry| machine.overlapping(entry)).collect();
        self.plan.kernels.push(KernelPlan {
            name: format!("comm_cast_{name}_{}", desc.comm_dtype),
            entries,
            op: desc.clone().with(config),
        });
        let mut pack = vec![rows, sent.places, sent.bytes];
        let mut steps = Vec::new();
        if desc.counts() {
            // All kinds of rows share both tensors: the output is the count of everything that this
            // rank cast. Blocks of other kinds have other numbers of rows, so there is room for
            // blocks of one row.
            let counts = self.tensor(
                "comm_cast",
                "counts",
                I32,
                &[Size::Tokens],
                TensorRole::Scratch,
            );
            let all = self.tensor(
                "comm_cast",
                "saturated",
                I64,
                &[Size::Const(1)],
                TensorRole::Output,
            );
            pack.push(counts);
            steps.push(self.step(kernel, 0, pack));
            steps.push(self.step(kernel, 1, vec![counts, all]));
        } else {
            steps.push(self.step(kernel, 0, pack));
        }
        // Behind the count of saturated values, where there is one.
        let last = self.plan.kernels[kernel].entries.len() - 1;
        let packed = Packed {
            comm_dtype: desc.comm_dtype,
            row_bytes: desc.row_bytes(),
            pack: steps,
            unpack: self.step(kernel, last, vec![received.bytes, received.places, rows]),
            rows,
            sent,
            received,
        };
        self.known.push((desc, packed.clone()));
        packed
    }

    /// Returns the tensor of an exchange, adding it if this is its first use.
    fn tensor(
        &mut self,
        of: &str,
        name: &str,
        dtype: DType,
        shape: &[Size],
        role: TensorRole,
    ) -> TensorId {
        let name = format!("{of}.{name}");
        self.plan.id(&name).unwrap_or_else(|| {
            let shape = shape.to_vec();
            self.plan.tensors.push(TensorPlan {
                name,
                dtype,
                shape,
                role,
            });
            TensorId(self.plan.tensors.len() - 1)
        })
    }

    fn step(&mut self, kernel: usize, entry: usize, tensors: Vec<TensorId>) -> usize {
        let entry = EntryId { kernel, entry };
        self.plan
            .steps
            .push(Step::Launch(LaunchStep { entry, tensors }));
        self.plan.steps.len() - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::plan_rank;
    use crate::{PlanOptions, Training};
    use moesaic_dist::Parallel;
    use moesaic_spec::LayerSpec;

    fn planned(activations: &str) -> RankPlan {
        let text = format!(
            "shape = {{ model_dim = 160, hidden_dim = 16, experts = 8, top_k = 2 }}
             precision = {{ activations = '{activations}' }}"
        );
        let spec = LayerSpec::from_toml(&text).unwrap();
        let mesh = Parallel {
            ep: 4,
            ..Parallel::default()
        };
        let options = PlanOptions::training(Training::default());
        plan_rank(&spec, "cuda:sm_90a".parse().unwrap(), &options, mesh, 1).unwrap()
    }

    /// Returns the exchange lines of the plan's text, without launches of other parts.
    fn exchanged(plan: &RankPlan) -> Vec<String> {
        let text = plan.text();
        let lines = text.lines().map(str::trim);
        let between = |line: &&str| line.starts_with("nodes") || line.starts_with("ranks");
        lines.filter(between).map(str::to_string).collect()
    }

    #[test]
    fn rows_are_packed_before_they_go_and_unpacked_when_they_came() {
        let comm_dtype = Both {
            forward: CommDtype::F16,
            backward: CommDtype::Fp8,
        };
        let lines = exchanged(&planned("f32").in_comm_dtype(comm_dtype));
        let rows = "ranks    rows to rows of experts: 640 bytes a row; between nodes f16, \
                    320 bytes a row";
        let at = lines.iter().position(|line| line == rows).unwrap();
        let around = [
            "nodes    comm_cast_pack",
            "nodes    comm_cast_count",
            rows,
            "nodes    comm_cast_unpack",
        ];
        assert_eq!(lines[at - 2..at + 2], around);
        let back = "ranks    drows of experts to drows: 640 bytes a row; between nodes fp8, \
                    176 bytes a row";
        let at = lines.iter().position(|line| line == back).unwrap();
        let around = ["nodes    comm_cast_pack", back, "nodes    comm_cast_unpack"];
        assert_eq!(lines[at - 1..at + 2], around);
        let whole = lines.iter().filter(|line| line.contains("dweight_parts"));
        assert!(whole.clone().count() > 0 && !whole.into_iter().any(|line| line.contains("nodes")));
    }

    #[test]
    fn one_kernel_is_for_all_rows_of_a_kind() {
        let plan = planned("f32").in_comm_dtype(Both::same(CommDtype::Fp8));
        let casts = plan.comm_cast.unwrap();
        assert_eq!((casts.kernels.len(), casts.steps.len()), (1, 2));
        assert_eq!(casts.kernels[0].name, "comm_cast_rows_fp8");
        for step in &casts.steps {
            for (tensor, param) in casts.names(step).zip(["rows", "places", "packed"]) {
                assert!(!tensor.is_empty() && !param.is_empty());
            }
        }
    }

    #[test]
    fn rows_that_are_of_the_type_stay_as_they_are() {
        let plan = planned("bf16");
        assert_eq!(plan.in_comm_dtype(Both::same(CommDtype::Unchanged)), plan);
        assert_eq!(plan.in_comm_dtype(Both::same(CommDtype::Bf16)), plan);
        assert_ne!(plan.in_comm_dtype(Both::same(CommDtype::F16)), plan);
    }

    #[test]
    fn what_other_nodes_get_is_counted_as_packed() {
        let plan = planned("f32");
        let packed = plan.in_comm_dtype(Both::same(CommDtype::Fp8));
        let of = |plan: &RankPlan| plan.bytes_of(&plan.steps, 100, 2);
        let (exact, packed) = (of(&plan), of(&packed));
        assert_eq!((exact.here, exact.node), (packed.here, packed.node));
        // 100 tokens, two experts each: half of the rows, there and back.
        assert_eq!(exact.network - packed.network, 2 * 100 * (640 - 176));
    }
}
