//! One suite for every target: the same layers, the same tolerances, expected
//! values from the f64 reference.
//!
//! Each stage is held against the reference *on the stage's own inputs* as
//! the device computed them, so a difference names the kernel that made it,
//! and routing, counts and locations can be compared exactly.

mod adaptive;
mod addresses;
mod arranged;
mod bank;
mod batch;
mod by_token;
mod caches;
mod case;
mod cases;
mod combined;
mod comm_dtype;
mod compare;
mod decode;
mod drawn;
mod emulated;
mod evaluation;
mod gates;
mod global_loss;
mod gradient_dtype;
mod handles;
mod killed;
mod layer_tensors;
pub mod layers;
pub mod mesh;
mod mesh_adaptive_r;
mod mesh_all_to_all;
mod mesh_disagreement;
mod mesh_equal_weights;
mod mesh_gates;
mod mesh_groups;
mod mesh_placed;
mod mesh_processes;
mod mesh_raw;
mod mesh_shadows;
mod mesh_shared;
mod mesh_slow;
mod mesh_training;
mod mesh_weights;
mod migration;
mod nccl;
mod nodes;
mod options;
mod orders;
mod pieces;
mod pipelined;
mod precision;
pub mod quick;
mod random;
mod replay;
mod routers;
mod routing;
mod sampled;
mod saved;
pub mod simulated;
mod simulated_training;
mod spoilt;
mod stored;
mod stored_random;
mod stored_training;
mod tiles;
mod trained;
mod training;
mod tuned;
mod user;
mod user_ranks;
mod watched;
mod zeros;

pub use case::Case;
pub use simulated::SIMULATORS;
