//! The least work of a launch, arithmetic and bytes, for rooflines.

use crate::{LayerPlan, Step, TensorPlan, TensorRole};
use std::collections::BTreeSet;

/// The least arithmetic and traffic of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Floating-point operations; a multiply-add counts two.
    pub flops: f64,
    /// Bytes read and written, each tensor once; of weights only those of
    /// experts that can have rows.
    pub bytes: f64,
}

impl Work {
    /// Returns the work of a step of `plan` for `tokens` tokens, without drops; none if its grid is
    /// empty in such a call.
    ///
    /// # Panics
    ///
    /// When the step is not of this plan.
    pub fn of(plan: &LayerPlan, step: &Step, tokens: u64) -> Work {
        let Step::Launch(launch) = step;
        let op = &plan.kernels[launch.entry.kernel].op;
        if plan[launch.entry].launch.blocks(tokens) == 0 {
            return Work::default();
        }
        Work {
            flops: op.flops(plan.symbol(step), tokens as f64),
            bytes: bytes(plan, step, tokens),
        }
    }

    /// Returns the roofline on a machine with these limits. The bytes are charged to the smallest
    /// level that holds all of them, because a launch may find them there.
    pub fn floor(&self, roofs: &Roofs<'_>) -> Floor {
        if self.flops == 0.0 && self.bytes == 0.0 {
            return Floor {
                seconds: 0.0,
                bound: Bound::Nothing,
            };
        }
        let compute = self.flops / roofs.flops_per_second;
        let level = roofs
            .levels
            .iter()
            .position(|level| level.holds(self.bytes));
        // A level whose rate is unknown sets no limit, because a guess could put the roofline above
        // a kernel.
        let rate = level.and_then(|i| roofs.levels[i].bytes_per_second);
        let memory = rate.map_or(0.0, |rate| self.bytes / rate);
        let seconds = compute.max(memory).max(roofs.launch_seconds);
        let bound = match level {
            _ if seconds == compute => Bound::Arithmetic,
            Some(level) if seconds == memory => Bound::Level(level),
            _ => Bound::Launch,
        };
        Floor { seconds, bound }
    }
}

/// The limits of a machine for one launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Roofs<'a> {
    /// The rate of its arithmetic, in FLOP/s.
    pub flops_per_second: f64,
    /// The caches that all cores or blocks have together, smallest first, then memory.
    pub levels: &'a [MemoryLevel],
    /// The shortest time of a launch that does nothing.
    pub launch_seconds: f64,
}

/// A cache or the memory of a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryLevel {
    /// The name, such as `L2` or `memory`.
    pub name: String,
    /// The bytes that it holds; `None` for memory, which holds every launch.
    pub capacity: Option<u64>,
    /// The rate of reads from it; `None` if nobody has measured or stated it.
    pub bytes_per_second: Option<f64>,
}

impl MemoryLevel {
    /// Returns the levels of a machine whose rates were measured, in 1e9 bytes per second: caches by
    /// level, bytes and rate, smallest first, then memory. A cache that was not faster than memory
    /// gets memory's rate, because such a measurement says nothing about the cache.
    pub fn measured(
        caches: impl IntoIterator<Item = (u8, u64, f64)>,
        memory: f64,
    ) -> Vec<MemoryLevel> {
        let caches = caches.into_iter().map(|(level, bytes, rate)| MemoryLevel {
            name: format!("L{level}"),
            capacity: Some(bytes),
            bytes_per_second: Some(rate.max(memory) * 1e9),
        });
        let memory = MemoryLevel {
            name: "memory".to_string(),
            capacity: None,
            bytes_per_second: Some(memory * 1e9),
        };
        caches.chain([memory]).collect()
    }

    fn holds(&self, bytes: f64) -> bool {
        self.capacity
            .is_none_or(|capacity| bytes <= capacity as f64)
    }
}

/// The roofline of a [`Work`] on a machine: no kernel is faster.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Floor {
    /// The time.
    pub seconds: f64,
    /// The limit that sets the time.
    pub bound: Bound,
}

/// The limit that sets the roofline of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// The launch does nothing.
    Nothing,
    /// The rate of arithmetic.
    Arithmetic,
    /// The bandwidth of a level, by its index in [`Roofs::levels`].
    Level(usize),
    /// The time of an empty launch.
    Launch,
}

impl std::ops::Add for Work {
    type Output = Work;
    fn add(self, rhs: Work) -> Work {
        Work {
            flops: self.flops + rhs.flops,
            bytes: self.bytes + rhs.bytes,
        }
    }
}

/// Returns the bytes of the step's tensors, each once.
fn bytes(plan: &LayerPlan, step: &Step, tokens: u64) -> f64 {
    // By name, because one tensor may stand behind two parameters, a pointer and a tensor map.
    let names: BTreeSet<&str> = plan.names(step).collect();
    let tensors = names.into_iter().filter_map(|name| plan.tensor(name));
    let bytes = tensors.map(|tensor| {
        let matrices = matches!(tensor.role, TensorRole::Weight | TensorRole::Packed);
        // A stack of matrices has three dimensions. A stack of biases has two, and counts as a
        // whole: it is a thousandth of the traffic.
        let stack = matrices && tensor.shape.len() > 2;
        let share = if stack {
            active(plan, tensor, tokens)
        } else {
            1.0
        };
        tensor.bytes(tokens) as f64 * share
    });
    bytes.sum()
}

/// Returns the share of a stack's matrices, one per expert, that can have rows at all.
fn active(plan: &LayerPlan, stack: &TensorPlan, tokens: u64) -> f64 {
    let experts = stack.shape[0].eval(tokens) as f64;
    let slots = tokens as f64 * plan.spec.shape.top_k as f64;
    // The most that can be active: every assignment goes to an expert of its own, until all have
    // one.
    (slots / experts).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn level(name: &str, capacity: Option<u64>, bytes_per_second: Option<f64>) -> MemoryLevel {
        MemoryLevel {
            name: name.to_string(),
            capacity,
            bytes_per_second,
        }
    }

    #[test]
    fn a_cache_is_no_slower_than_memory() {
        let levels = MemoryLevel::measured([(2, 1 << 20, 50.0), (3, 1 << 25, 8.0)], 10.0);
        let expected = [
            level("L2", Some(1 << 20), Some(50e9)),
            level("L3", Some(1 << 25), Some(10e9)),
            level("memory", None, Some(10e9)),
        ];
        assert_eq!(levels, expected);
    }

    #[test]
    fn bytes_are_charged_to_the_level_that_holds_them() {
        let levels = [
            level("L2", Some(1_000), Some(1e9)),
            level("L3", Some(10_000), None),
            level("memory", None, Some(1e8)),
        ];
        let roofs = Roofs {
            flops_per_second: 1e9,
            levels: &levels,
            launch_seconds: 1e-7,
        };
        let floor = |flops, bytes| Work { flops, bytes }.floor(&roofs);
        let expect = |seconds, bound| Floor { seconds, bound };
        assert_eq!(floor(0.0, 0.0), expect(0.0, Bound::Nothing));
        assert_eq!(floor(0.0, 1e3), expect(1e-6, Bound::Level(0)));
        assert_eq!(floor(5e3, 1e3), expect(5e-6, Bound::Arithmetic));
        // A level of an unknown rate bounds nothing.
        assert_eq!(floor(0.0, 1e4), expect(1e-7, Bound::Launch));
        assert_eq!(floor(0.0, 1e5), expect(1e-3, Bound::Level(2)));
        assert_eq!(floor(0.0, 1.0), expect(1e-7, Bound::Launch));
    }
}
