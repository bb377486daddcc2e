//! Layers over ranks with a stream each, whose rows go by a stand-in for NCCL. Kernels are
//! those of the CPU; each runs when its rank's stream has come to it, so that whatever does
//! not wait where it must reads rows that are not there. Nothing here has seen a real GPU.

#[path = "../../runtime/collectives/tests/nccl_fake/mod.rs"]
mod nccl_fake;

use super::case::Case;
use super::mesh::{
    Grid, Ranks, compare_on, evaluated, layer_on, mesh, part, sharded, shares, spec,
};
use super::mesh_adaptive_r::at_r;
use super::mesh_raw;
use moesaic::collectives::{Call, Collectives};
use moesaic::{Engine, EngineError, EngineOptions, Mesh, Parallel, Recompute};
use nccl_fake::Lab;

/// The CPU whose kernels run, compiled as those of [`Engine::on_device`] are.
fn cpu() -> Engine {
    Engine::cpu().expect("a C compiler")
}

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

/// A layer with all that ranks do together.
const GATED: &str = "shape = { model_dim = 24, hidden_dim = 16, experts = 6, top_k = 2 }
     router = { renormalize = 'sum' }
     experts = { bias = true }
     losses = [{ kind = 'global', coefficient = 0.3 }]
     shared = [{ hidden_dim = 12, gate = 'sigmoid' }]";

#[test]
fn layers_over_nccl_are_those_over_threads() {
    let engine = cpu();
    let case = Case::random(&spec(GATED), 41, 2);
    for parallel in [
        mesh(2, 1, 1),
        mesh(2, 2, 1),
        mesh(2, 1, 2),
        sharded(1, 2, 1),
        sharded(2, 2, 1),
    ] {
        let gpus = Gpus(Lab::new());
        let (found, want) = (
            evaluated(&gpus, parallel, &case),
            evaluated(&engine, parallel, &case),
        );
        assert!(found == want, "{parallel:?}");
        compare_on(&engine, &gpus, parallel, &case, Recompute::None);
    }
}

/// The caller's memory is read and written by launches that wait on the stream.
#[test]
fn calls_on_device_memory_go_over_nccl() {
    let case = Case::random(&spec(GATED), 41, 2);
    for (parallel, strategy) in [
        (mesh(2, 1, 1), "default"),
        (mesh(3, 1, 1), "overlap_degree=2"),
        (mesh(2, 2, 1), "r=1"),
        (sharded(2, 2, 1), "overlap_degree=2/1"),
    ] {
        let strategy = strategy.parse().unwrap();
        let grid = Grid { parallel, strategy };
        mesh_raw::check(&Gpus(Lab::new()), grid, &case);
    }
    // Timed by events of the stream.
    let case = Case::random(&spec(PIECES), 41, 2);
    let (gpus, tuner) = (Gpus(Lab::new()), mesh_raw::two_strategies());
    mesh_raw::check_adaptive(&gpus, mesh(2, 1, 1), &case, &tuner);
}

const PIECES: &str = "shape = { model_dim = 24, hidden_dim = 16, experts = 6, top_k = 2 }
     experts = { bias = true }";

/// On a stream of their own, which the stand-in never finds at work beside another exchange.
#[test]
fn chunks_go_over_nccl_too() {
    let engine = cpu();
    let case = Case::random(&spec(PIECES), 41, 2);
    for (parallel, strategy) in [
        (mesh(2, 1, 1), "overlap_degree=4/2"),
        (mesh(1, 2, 1), "overlap_degree=2"),
        (mesh(2, 2, 1), "overlap_degree=2,all_to_all=2dh-concurrent"),
        (mesh(4, 1, 1), "overlap_degree=2/3,all_to_all=dedup"),
        (mesh(2, 2, 1), "r=1,overlap_degree=2"),
    ] {
        let gpus = Gpus(Lab::new());
        let strategy = strategy.parse().unwrap();
        let grid = Grid { parallel, strategy };
        compare_on(&engine, &gpus, grid, &case, Recompute::None);
    }
}

/// The second chunk comes while products of the first run: each ends only when the other is
/// there, which one stream could not do.
#[test]
fn a_chunk_travels_on_a_stream_while_experts_multiply() {
    let kernels = cpu();
    let case = Case::random(&spec(PIECES), 41, 2);
    let parallel = mesh(2, 1, 1);
    let halves = shares(41, 2);
    let want = evaluated(&kernels, parallel, &case);
    let lab = Lab::new();
    let gpus = [0, 1].map(|rank| lab.device_of(rank, kernels.device().clone()));
    let results = lab.run_on(&gpus, |control, gpu| {
        let engine = Engine::on_device(gpu.clone(), EngineOptions::default()).unwrap();
        let mut world = engine.nccl_over(control, lab.options()).unwrap();
        let mesh = Mesh::new(&mut world, parallel).unwrap();
        let layer = layer_on(&engine, &mesh, &case, None);
        layer
            .set_strategy("overlap_degree=2".parse().unwrap())
            .unwrap();
        world.barrier(&Call::new("ready")).unwrap().wait().unwrap();
        // After the counts, and the first chunk.
        lab.meet(mesh.rank(), 2);
        let own = part(&case, &halves[mesh.rank()]);
        let y = layer.forward(&own.input()).unwrap().y().data.to_vec();
        drop((layer, mesh));
        world.finish(&Call::new("end")).unwrap();
        y
    });
    let found: Vec<u8> = results.into_iter().flat_map(Option::unwrap).collect();
    lab.legal();
    assert!(found == want);
}

#[test]
fn weights_are_gathered_over_nccl() {
    let engine = cpu();
    let case = Case::random(&spec(GATED), 31, 6);
    for adaptive_r in [1, 0] {
        let gpus = Gpus(Lab::new());
        let grid = at_r(mesh(2, 2, 1), adaptive_r);
        let found = evaluated(&gpus, grid, &case);
        assert!(found == evaluated(&engine, grid, &case), "{grid:?}");
        compare_on(&engine, &gpus, grid, &case, Recompute::None);
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

/// The host waits for no exchange of rows by itself: what fails on the stream has to be an
/// error all the same, whichever exchange it is.
#[test]
fn a_failed_exchange_is_an_error_and_never_a_result() {
    let kernels = cpu();
    let case = Case::random(
        &spec("shape = { model_dim = 12, hidden_dim = 8, experts = 4, top_k = 2 }"),
        20,
        3,
    );
    let parallel = mesh(2, 1, 1);
    let halves = shares(20, 2);
    let want = evaluated(&kernels, parallel, &case);
    let row = want.len() / 20;
    let mut phases = Vec::new();
    for at in 0..4 {
        let lab = Lab::new();
        let gpus = [0, 1].map(|rank| lab.device_of(rank, kernels.device().clone()));
        let results = lab.run_on(&gpus, |control, gpu| -> Result<Vec<u8>, String> {
            let text = |error: EngineError| error.to_string();
            let engine = Engine::on_device(gpu.clone(), EngineOptions::default()).unwrap();
            let mut world = engine.nccl_over(control, lab.options()).map_err(text)?;
            let mesh = Mesh::new(&mut world, parallel).map_err(text)?;
            let layer = layer_on(&engine, &mesh, &case, None);
            // Both are here; what follows is the pass alone.
            world.barrier(&Call::new("ready")).unwrap().wait().unwrap();
            lab.set("fail_rank", 1);
            lab.set("fail_at", at);
            let own = part(&case, &halves[mesh.rank()]);
            let output = layer.forward(&own.input()).map_err(text)?;
            Ok(output.y().data.to_vec())
        });
        for (rank, result) in results.into_iter().enumerate() {
            let tokens = &halves[rank];
            match result.expect("no rank panics") {
                Ok(y) => assert!(y == want[tokens.start * row..tokens.end * row], "at {at}"),
                Err(error) => phases.push(error),
            }
        }
    }
    for phase in ["(counts of", "(rows of", "(out of"] {
        let seen = phases.iter().any(|error| error.contains(phase));
        assert!(seen, "nothing failed in `{phase}`: {phases:#?}");
    }
}
