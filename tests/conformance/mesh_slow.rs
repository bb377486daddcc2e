//! One rank compiles for long: the others wait, whatever their deadline is.

use super::layers::poisoned;
use super::mesh::{layer_on, mesh, part, spec};
use super::{Case, quick};
use moesaic::collectives::{Call, threads};
use moesaic::kernel::{KernelSource, Target};
use moesaic::target::{Artifact, CompileError, CompileOptions, Compiler};
use moesaic::{Engine, EngineOptions, LayerOptions, Mesh};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

const DEADLINE: Duration = Duration::from_millis(1500);
/// Longer than the deadline by more than another rank takes to compile.
const SLOW: Duration = Duration::from_millis(2600);

/// Behaviour of the next compile.
const QUICKLY: u8 = 0;
const SLOWLY: u8 = 1;
const NOT: u8 = 2;

/// A compiler that takes long once, or fails.
struct Moody {
    inner: Arc<dyn Compiler>,
    next: Arc<AtomicU8>,
}

impl Compiler for Moody {
    fn backend(&self) -> &'static str {
        self.inner.backend()
    }

    fn name(&self) -> String {
        self.inner.name()
    }

    fn fingerprint(&self, target: Target) -> String {
        self.inner.fingerprint(target)
    }

    fn targets(&self) -> Vec<Target> {
        self.inner.targets()
    }

    fn compile(
        &self,
        source: &KernelSource,
        options: &CompileOptions,
    ) -> Result<Artifact, CompileError> {
        match self.next.swap(QUICKLY, Ordering::SeqCst) {
            SLOWLY => std::thread::sleep(SLOW),
            NOT => {
                return Err(CompileError::Rejected {
                    compiler: self.name(),
                    kernel: source.name.clone(),
                    target: source.target.to_string(),
                    log: "its disk is full".to_string(),
                });
            }
            _ => {}
        }
        self.inner.compile(source, options)
    }
}

/// A rank: its engine, whose next compile it decides, and its mesh.
struct Rank {
    engine: Engine,
    mesh: Mesh,
    next: Arc<AtomicU8>,
}

impl Rank {
    fn second_compiles(&self, how: u8) {
        let how = if self.mesh.rank() == 1 { how } else { QUICKLY };
        self.next.store(how, Ordering::SeqCst);
    }
}

/// Returns the results of two ranks with a compiler each.
fn two<T: Send>(deadline: Duration, body: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    let inner = moesaic_harness::quick::cpu();
    let device = quick::open("cpu", poisoned()).unwrap().device().clone();
    let ranks = threads::run(
        2,
        |_| Ok(device.clone()),
        |world| {
            let mut world = world.with_deadline(deadline);
            let next = Arc::new(AtomicU8::new(QUICKLY));
            let moody = Arc::new(Moody {
                inner: inner.clone(),
                next: next.clone(),
            });
            let options = EngineOptions {
                store: None,
                ..poisoned()
            };
            let engine = Engine::open_with("cpu", options, moody).unwrap();
            let mesh = Mesh::new(&mut world, mesh(2, 1, 1)).unwrap();
            let result = body(Rank { engine, mesh, next });
            world.finish(&Call::new("end")).unwrap();
            result
        },
    );
    let ranks = ranks.unwrap().into_iter();
    ranks.map(|rank| rank.unwrap()).collect()
}

const LAYER: &str = "shape = { model_dim = 16, hidden_dim = 16, experts = 4, top_k = 2 }";

#[test]
fn a_rank_that_compiles_for_longer_than_the_deadline_is_not_late() {
    let case = Case::random(&spec(LAYER), 8, 3);
    two(DEADLINE, |rank| {
        let own = part(&case, &(4 * rank.mesh.rank()..4 * rank.mesh.rank() + 4));
        rank.second_compiles(SLOWLY);
        let layer = layer_on(&rank.engine, &rank.mesh, &case, None);
        layer.forward(&own.input()).unwrap();
    });
}

/// A layer's kernels, and those of rows that travel in 8 bits.
#[test]
fn a_rank_that_cannot_compile_tells_the_others_why() {
    let case = Case::random(&spec(LAYER), 8, 3);
    let errors = two(moesaic::collectives::DEADLINE, |rank| {
        let make = || {
            let weights = case.host_weights();
            rank.engine
                .layer_with(&case.spec, &weights, LayerOptions::over(&rank.mesh))
        };
        rank.second_compiles(NOT);
        let layer = make().expect_err("a rank has no kernels").to_string();
        let made = make().unwrap();
        rank.second_compiles(NOT);
        let strategy = made.set_strategy("comm_dtype=fp8".parse().unwrap());
        [layer, strategy.unwrap_err().to_string()]
    });
    for own in &errors[1] {
        let told = own.contains("its disk is full") && !own.contains("rank");
        assert!(told, "{errors:?}");
    }
    for (theirs, what) in errors[0].iter().zip(["kernels and weights", "packed rows"]) {
        for words in ["rank 1 failed", "its disk is full", what] {
            assert!(theirs.contains(words), "{errors:?}");
        }
    }
}
