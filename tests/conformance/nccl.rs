//! Layers over ranks with a stream each, whose rows go by a stand-in for NCCL. Kernels are
//! those of the CPU; each runs when its rank's stream has come to it, so that whatever does
//! not wait where it must reads rows that are not there. Nothing here has seen a real GPU.

// What the other users of the stand-in need.
#[allow(dead_code)]
#[path = "../../runtime/collectives/tests/nccl_fake/mod.rs"]
mod nccl_fake;

use super::case::Case;
use super::layers::engine as cpu;
use super::mesh::{Ranks, compare_on, evaluated, mesh, spec};
use moesaic::collectives::Call;
use moesaic::{Engine, EngineOptions, Mesh, Parallel, Recompute};
use nccl_fake::Lab;

/// Ranks with a device of the stand-in each.
struct Gpus(Lab);

impl Ranks for Gpus {
    fn each<T: Send>(
        &self,
        parallel: Parallel,
        body: impl Fn(&Engine, &Mesh) -> T + Sync,
    ) -> Vec<T> {
        let (lab, kernels) = (&self.0, cpu());
        let gpu = |rank| lab.device_of(rank, kernels.device().clone());
        let gpus: Vec<_> = (0..parallel.ranks()).map(gpu).collect();
        let results = lab.run_on(&gpus, |control, gpu| {
            let engine = Engine::on_device(gpu.clone(), EngineOptions::default()).unwrap();
            let mut world = engine.nccl_over(control, lab.options()).unwrap();
            let mesh = Mesh::new(&mut world, parallel).unwrap();
            let result = body(&engine, &mesh);
            world.finish(&Call::new("end")).unwrap();
            result
        });
        let results: Option<Vec<T>> = results.into_iter().collect();
        lab.legal();
        assert_eq!(lab.live(), 0, "communicators were left");
        results.expect("every rank comes to its end")
    }
}

#[test]
fn layers_over_nccl_are_those_over_threads() {
    let engine = cpu();
    let text = "shape = { model_dim = 24, hidden_dim = 16, experts = 6, top_k = 2 }
         router = { renormalize = 'sum' }
         experts = { bias = true }
         losses = [{ kind = 'global', coefficient = 0.3 }]
         shared = [{ hidden_dim = 11, gate = 'sigmoid' }]";
    let case = Case::random(&spec(text), 41, 2);
    for parallel in [mesh(2, 1, 1), mesh(2, 2, 1), mesh(2, 1, 2)] {
        let gpus = Gpus(Lab::new());
        let (found, want) = (
            evaluated(&gpus, parallel, &case),
            evaluated(&engine, parallel, &case),
        );
        assert!(found == want, "{parallel:?}");
        compare_on(&engine, &gpus, parallel, &case, Recompute::None);
    }
}

#[test]
fn capacities_are_agreed_over_nccl() {
    let engine = cpu();
    let text = "shape = { model_dim = 12, hidden_dim = 8, experts = 4, top_k = 2 }
         capacity = { mode = 'max-count' }";
    let case = Case::random(&spec(text), 40, 4);
    let gpus = Gpus(Lab::new());
    let parallel = mesh(3, 1, 1);
    let found = evaluated(&gpus, parallel, &case);
    assert!(found == evaluated(&engine, parallel, &case));
}
