//! Tunings of layers: found in the store, and used where they fit.

use crate::error::EngineError;
use moesaic_cache::{Bucket, Store, Tuned, TunedMachine, hash_source};
use moesaic_emit::emit;
use moesaic_plan::{KernelPlan, LayerPlan, PlanOptions, Tilings, Tuning, plan};
use std::sync::OnceLock;

/// A layer on a target, identified by the inputs of its kernels without a tuning. Another spec,
/// other tilings or other templates make another layer, which does not find this one's tunings.
#[derive(Debug)]
pub struct Untuned {
    /// The plan without a tuning.
    pub plan: LayerPlan,
    digest: String,
}

/// The result of measuring one number of tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct TunedTimes {
    /// The number of tokens.
    pub tokens: usize,
    /// Sizes that are better than the default.
    pub tuning: Tuning,
    /// The default's time over the tuned layer's.
    pub gain: f64,
}

/// The plans of a layer with a tuning that was kept.
#[derive(Debug)]
pub struct TunedPlans {
    /// The plan without sizes of the tuning, and that of each bucket.
    pub tilings: Tilings,
    /// The stored tuning.
    pub tuned: Tuned,
}

impl Untuned {
    /// Returns the layer of a plan without a tuning.
    pub fn new(plan: LayerPlan) -> Untuned {
        let digest = digest(&plan);
        Untuned { plan, digest }
    }

    /// Returns the plan with other tile sizes.
    ///
    /// # Errors
    /// When it cannot be planned.
    pub fn with(&self, tuning: &Tuning) -> Result<LayerPlan, EngineError> {
        let LayerPlan { spec, target, .. } = &self.plan;
        let options = PlanOptions {
            training: self.plan.training,
            tuning: tuning.clone(),
            caches: self.plan.caches,
            ..PlanOptions::default()
        };
        Ok(plan(spec, *target, &options)?)
    }

    /// Returns the tuning to store, from measurements.
    ///
    /// # Errors
    /// When a plan of it cannot be made or emitted.
    pub fn tuned(&self, found: &[TunedTimes], machine: TunedMachine) -> Result<Tuned, EngineError> {
        let buckets = found.iter().map(|one| self.bucket(one));
        let mut buckets = buckets.collect::<Result<Vec<Bucket>, EngineError>>()?;
        buckets.sort_by_key(|bucket| bucket.tokens);
        Ok(Tuned {
            target: self.plan.target,
            layer: self.digest.clone(),
            machine,
            name: self.plan.spec.name.clone(),
            buckets,
        })
    }

    fn bucket(&self, found: &TunedTimes) -> Result<Bucket, EngineError> {
        let sizes = found.tuning.sizes();
        let sizes = sizes.map(|(knob, size)| (knob.name().to_string(), size));
        Ok(Bucket {
            tokens: found.tokens,
            sizes: sizes.collect(),
            kernels: self.changed(&self.with(&found.tuning)?)?,
            gain: found.gain,
        })
    }

    /// Returns the tuning stored for a machine.
    pub fn on(&self, store: &Store, machine: &TunedMachine) -> Option<TunedPlans> {
        let tuned = store.tuned(self.plan.target, &self.digest, machine)?;
        self.fitting(tuned)
    }

    /// Returns the tunings stored for any machine.
    pub fn everywhere(&self, store: &Store) -> Vec<TunedPlans> {
        let all = store.tunings_of(self.plan.target, &self.digest).into_iter();
        all.filter_map(|tuned| self.fitting(tuned)).collect()
    }

    /// Returns the plans with a tuning; `None` unless all of its sizes are candidates of this
    /// version.
    fn fitting(&self, tuned: Tuned) -> Option<TunedPlans> {
        let tilings = self.checked(&tuned);
        if tilings.is_none() {
            let machine = &tuned.machine.name;
            tracing::warn!(%machine, "going on without a tuning that another version made");
        }
        let tilings = tilings?;
        Some(TunedPlans { tilings, tuned })
    }

    fn checked(&self, tuned: &Tuned) -> Option<Tilings> {
        let mut tilings = Tilings::from(self.plan.clone());
        for bucket in &tuned.buckets {
            tilings = tilings.with(bucket.tokens, self.plan_of(bucket)?);
        }
        Some(tilings)
    }

    fn plan_of(&self, bucket: &Bucket) -> Option<LayerPlan> {
        let sizes = bucket.sizes.iter();
        let tuning = sizes.map(|(name, &size)| Tuning::named(name, size));
        let tuning = tuning.collect::<Option<Vec<Tuning>>>()?.into_iter();
        let tuning = tuning.fold(Tuning::default(), Tuning::and);
        // The file may come from another version, whose candidates were others.
        if tuning.fits(&self.plan) {
            self.with(&tuning).ok()
        } else {
            None
        }
    }

    /// Returns hashes of the kernels that differ from those without a tuning: a pack has a tuning
    /// if it has these.
    fn changed(&self, plan: &LayerPlan) -> Result<Vec<String>, EngineError> {
        let pairs = plan.kernels.iter().zip(&self.plan.kernels);
        let changed = pairs.filter(|(tuned, plain)| tuned != plain);
        let hash = |kernel: &KernelPlan| Ok(hash_source(&emit(kernel, plan.target)?.text));
        changed.map(|(tuned, _)| hash(tuned)).collect()
    }
}

/// Returns a hash of everything that kernel texts are made from.
fn digest(plan: &LayerPlan) -> String {
    // Timings of other kernels say nothing about these. The templates are part of it, because a
    // template can change while plan and version stay.
    let (version, target, kernels) = (env!("CARGO_PKG_VERSION"), plan.target, &plan.kernels);
    hash_source(&format!("{version} {target} {} {kernels:?}", templates()))
}

/// Returns a hash of the templates.
fn templates() -> &'static str {
    static HASH: OnceLock<String> = OnceLock::new();
    HASH.get_or_init(|| {
        let texts = moesaic_emit::templates().map(|(name, text)| format!("{name}\n{text}\n"));
        hash_source(&texts.collect::<String>())
    })
}
