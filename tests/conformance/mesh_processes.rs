//! Ranks that are processes under MPI compute the bytes of ranks that are threads, which other tests
//! hold against one process.

use super::Case;
use super::case::{floats, host};
use super::gates::SMALL;
use super::layers::engine;
use super::mesh::{layer_on, mesh, on_ranks, part, shares, spec};
use super::trained::RNG_KEY;
use super::{mesh_equal_weights, mesh_gates};
use moesaic::collectives::{Call, mpi};
use moesaic::toolchain::testing::mpich;
use moesaic::{DType, Mesh, Parallel, Training};

const RANKS: Parallel = mesh(4, 1, 1);

/// Returns `y` and `dx` of a rank whose tokens go to each other rank once.
fn deduplicated(mesh: &Mesh) -> [Vec<f64>; 2] {
    let text = "shape = { model_dim = 12, hidden_dim = 10, experts = 8, top_k = 4 }";
    let case = Case::random(&spec(text), 29, 3);
    let layer = layer_on(&engine(), mesh, &case, Some(Training::default()));
    let set = layer.set_strategy("all_to_all=dedup-ranks".parse().unwrap());
    set.unwrap();
    let share = &shares(29, RANKS.ranks())[mesh.rank()];
    let own = part(&case, share);
    let (output, saved) = layer.forward_train(&own.input(), RNG_KEY).unwrap();
    let width = case.spec.output_dim();
    let dy = &case.dy(4)[share.start * width..share.end * width];
    let dy = host(DType::F32, &[share.len(), width], dy);
    let back = layer.backward(&saved, &dy, false).unwrap();
    layer.reduce_gradients().unwrap();
    [floats(&output, "y"), floats(&back, "dx")]
}

fn gates(mesh: &Mesh) -> mesh_gates::Rank {
    mesh_gates::of_rank(mesh, SMALL, "")
}

#[test]
#[ignore = "started by the other test, under mpiexec"]
fn a_process() {
    let options = mpi::MpiOptions::default();
    let mut world = mpi::start(&options, engine().device().clone()).expect("it is under mpiexec");
    let mesh = Mesh::new(&mut world, RANKS).expect("four ranks");
    let rank = mesh.rank();
    let threads = on_ranks(&engine(), RANKS, deduplicated);
    assert!(deduplicated(&mesh) == threads[rank], "deduplicated");
    let threads = on_ranks(&engine(), RANKS, gates);
    assert!(gates(&mesh).equals(&threads[rank]), "three gates");
    let text = mesh_equal_weights::refused(&mesh, "router.weight");
    assert!(
        text.contains("one on ranks 0, 2, 3, another on rank 1"),
        "{text}"
    );
    drop(mesh);
    world.finish(&Call::new("end")).expect("all came here");
    println!("rank {rank} is right");
}

#[test]
fn processes_compute_what_threads_do() {
    let this = std::env::current_exe().unwrap();
    let name = concat!(module_path!(), "::a_process");
    let (_, name) = name.split_once("::").expect("a crate and modules");
    let mut ranks = mpich().command_within(120, RANKS.ranks(), &this);
    let ended = ranks.args(["--ignored", "--exact", name, "--nocapture"]);
    let ended = ended.output().expect("mpiexec starts");
    let said = [&ended.stdout[..], &ended.stderr[..]].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(ended.status.success(), "{}: {said}", ended.status);
    assert_eq!(said.matches(" is right").count(), RANKS.ranks(), "{said}");
}
