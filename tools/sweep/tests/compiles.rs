//! A part of the sweep: one kernel of each of some layers, and all
//! layers that once spilled. `cargo xtask sweep` runs the rest.

use moesaic_kernel::Target;
use moesaic_sweep::Sweep;
use moesaic_target::Compiler;
use moesaic_toolchain::{Registry, ToolKind, install, nvrtc, rocm};

/// Number of layers of which one kernel is compiled.
const LAYERS: u64 = 80;

/// Seeds of layers with kernels that a sweep found to spill, each with its
/// target.
const FOUND: [(u64, &str); 6] = [
    // A thread kept the tokens of 32 rows, which it gathers four bytes at a
    // time, or values computed from them.
    (50535, "cuda:sm_103a"),
    (50561, "cuda:sm_90"),
    (51879, "cuda:sm_90"),
    // It kept distances of rows whose width depends on their owner.
    (94481, "cuda:sm_103"),
    // It kept, for every turn, in scalar registers whether elements are within
    // their lines.
    (14, "rocm:gfx942"),
    (41, "rocm:gfx90a"),
];

#[test]
fn random_layers_compile_for_every_gpu_without_spills() {
    let mut registry = Registry::open().unwrap();
    install(
        &mut registry,
        &[ToolKind::Cuda, ToolKind::Rocm],
        &mut |_| {},
    )
    .unwrap_or_else(|error| panic!("{error}"));
    let cuda = nvrtc(&registry).unwrap_or_else(|error| panic!("{error}"));
    let rocm = rocm(&registry).unwrap_or_else(|error| panic!("{error}"));
    let compilers: [&dyn Compiler; 2] = [&cuda, &rocm];
    let targets: Vec<Target> = compilers.iter().flat_map(|c| c.targets()).collect();
    let part = |seed, specs, targets, kernels| Sweep {
        seed,
        specs,
        draw: moesaic_sweep::layer,
        targets,
        each: 1,
        kernels,
        only: String::new(),
        with: String::new(),
        limit: None,
        threads: std::thread::available_parallelism().map_or(1, Into::into),
    };
    let found = FOUND.map(|(seed, target)| {
        let sweep = part(seed, 1, vec![target.parse().unwrap()], None);
        (sweep, 10)
    });
    // Some kernels are those of another layer.
    let drawn = (part(1 << 20, LAYERS, targets, Some(1)), LAYERS * 9 / 10);
    for (sweep, least) in [drawn].iter().chain(&found) {
        let mut failures = Vec::new();
        let table = sweep.run(&compilers, &mut |failure| {
            failures.push(format!("cargo xtask sweep {failure}"));
        });
        assert!(failures.is_empty(), "{}", failures.join("\n"));
        let kernels = table.kernels();
        assert!(kernels >= *least, "{kernels} kernels were compiled");
    }
}
