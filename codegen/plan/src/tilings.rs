//! A layer in several tilings, by the number of tokens of a call.

use crate::{LayerPlan, TensorId};

/// Plans of one layer that differ in tiles alone. A call runs the plan of the measured token count
/// that is nearest by ratio.
#[derive(Clone, Debug, PartialEq)]
pub struct Tilings {
    /// The first is for every count where there are no buckets.
    plans: Vec<LayerPlan>,
    /// Ascending.
    buckets: Vec<Bucket>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bucket {
    /// The count that was measured.
    tokens: usize,
    /// Index into the plans.
    plan: usize,
}

impl From<LayerPlan> for Tilings {
    /// Returns one plan for every number of tokens.
    fn from(plan: LayerPlan) -> Tilings {
        Tilings {
            plans: vec![plan],
            buckets: Vec::new(),
        }
    }
}

impl Tilings {
    /// Adds a plan for a number of tokens and those nearest to it. Equal plans are kept once.
    #[must_use]
    pub fn with(mut self, tokens: usize, plan: LayerPlan) -> Tilings {
        // The engine binds one list of tensors for all plans, by number.
        debug_assert!(self.first().launches_as(&plan), "{:?}", plan.tuning);
        // Several counts often have one best tiling, and every plan here is compiled and bound.
        let known = self.plans.iter().position(|known| *known == plan);
        let index = known.unwrap_or(self.plans.len());
        if known.is_none() {
            self.plans.push(plan);
        }
        let at = self.buckets.partition_point(|other| other.tokens < tokens);
        let bucket = Bucket {
            tokens,
            plan: index,
        };
        self.buckets.insert(at, bucket);
        self
    }

    /// Returns the first plan. All plans have its steps and, apart from sizes of scratch, its
    /// tensors.
    pub fn first(&self) -> &LayerPlan {
        &self.plans[0]
    }

    /// Returns every plan, each once.
    pub fn plans(&self) -> &[LayerPlan] {
        &self.plans
    }

    /// Returns the measured numbers of tokens, ascending, and the plan of each.
    pub fn buckets(&self) -> impl Iterator<Item = (usize, &LayerPlan)> {
        let buckets = self.buckets.iter();
        buckets.map(|bucket| (bucket.tokens, &self.plans[bucket.plan]))
    }

    /// Returns the index of the plan for a call of so many tokens.
    pub fn index(&self, tokens: usize) -> usize {
        let pairs = self.buckets.windows(2);
        let past = |pair: &&[Bucket]| is_past(tokens, pair[0].tokens, pair[1].tokens);
        let bucket = pairs.take_while(past).count();
        self.buckets.get(bucket).map_or(0, |bucket| bucket.plan)
    }

    /// Returns the plan for a call of so many tokens.
    pub fn at(&self, tokens: usize) -> &LayerPlan {
        &self.plans[self.index(tokens)]
    }

    /// Returns the most bytes that a tensor has in calls of up to `tokens` tokens.
    pub fn bytes(&self, tensor: TensorId, tokens: u64) -> u64 {
        // A workspace serves every later call of up to as many tokens, and those may have another
        // tiling.
        let each = self.plans.iter().map(|plan| plan[tensor].bytes(tokens));
        each.max().unwrap_or(0)
    }
}

impl LayerPlan {
    /// Returns whether another plan has the same steps on the same tensors.
    fn launches_as(&self, other: &LayerPlan) -> bool {
        let names = |plan: &LayerPlan| -> Vec<String> {
            plan.tensors
                .iter()
                .map(|tensor| tensor.name.clone())
                .collect()
        };
        let same = self.prepare == other.prepare && self.steps == other.steps;
        let same = same && self.backward == other.backward && self.evaluation == other.evaluation;
        same && names(self) == names(other)
    }
}

/// Returns whether a count is nearer to `more` than to `fewer`: past their geometric mean.
fn is_past(tokens: usize, fewer: usize, more: usize) -> bool {
    let square = |a: usize, b: usize| a as u128 * b as u128;
    // Squares instead of a root: whole numbers leave nothing to rounding, so every run takes the
    // same plan.
    square(tokens, tokens) > square(fewer, more)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Knob, PlanOptions, Tuning, plan};
    use moesaic_kernel::Target;
    use moesaic_spec::LayerSpec;

    fn spec() -> LayerSpec {
        let text = r#"{"shape":{"model_dim":70,"hidden_dim":90,"experts":4,"top_k":2}}"#;
        serde_json::from_str(text).unwrap()
    }

    fn target() -> Target {
        "cpu:avx2".parse().unwrap()
    }

    fn rows(size: usize) -> LayerPlan {
        let options = PlanOptions {
            tuning: Tuning::default().with(Knob::TileRows, size),
            ..PlanOptions::default()
        };
        plan(&spec(), target(), &options).unwrap()
    }

    /// The sizes of the plan for each count; 0 is none.
    fn check(tilings: &Tilings, expected: &[(usize, usize)]) {
        for &(tokens, size) in expected {
            let sizes = tilings.at(tokens).tuning.sizes().next();
            assert_eq!(sizes.map_or(0, |(_, size)| size), size, "{tokens} tokens");
        }
    }

    #[test]
    fn one_plan_is_for_all() {
        let tilings = Tilings::from(rows(96));
        check(&tilings, &[(0, 96), (1, 96), (usize::MAX, 96)]);
        assert_eq!(tilings.buckets().count(), 0);
    }

    #[test]
    fn a_count_has_the_plan_of_the_nearest_by_ratio() {
        let plain = plan(&spec(), target(), &PlanOptions::default()).unwrap();
        let tilings = Tilings::from(plain.clone())
            .with(1024, rows(192))
            .with(1, rows(96))
            .with(64, plain);
        check(&tilings, &[(0, 96), (1, 96), (8, 96), (9, 0), (64, 0)]);
        check(&tilings, &[(256, 0), (257, 192), (1024, 192)]);
        check(&tilings, &[(1 << 40, 192), (usize::MAX, 192)]);
        let counts: Vec<usize> = tilings.buckets().map(|(tokens, _)| tokens).collect();
        assert_eq!(counts, [1, 64, 1024]);
    }

    #[test]
    fn equal_plans_are_there_once() {
        let plain = plan(&spec(), target(), &PlanOptions::default()).unwrap();
        let tilings = Tilings::from(plain)
            .with(1, rows(96))
            .with(8, rows(96))
            .with(64, rows(192));
        assert_eq!(tilings.plans().len(), 3);
        check(&tilings, &[(1, 96), (8, 96), (22, 96), (23, 192)]);
    }

    #[test]
    fn a_tensor_has_room_for_every_plan() {
        let tokens = |plan: &mut LayerPlan, most: u64| {
            let named = plan.tensors.iter_mut().find(|tensor| tensor.name == "out");
            named.unwrap().shape = vec![moesaic_kernel::Size::Const(most)];
        };
        let (mut small, mut large) = (rows(96), rows(192));
        tokens(&mut small, 10);
        tokens(&mut large, 11);
        let out = large.id("out").unwrap();
        let tilings = Tilings::from(large).with(1, small);
        assert_eq!(tilings.bytes(out, 5), 44);
    }
}
