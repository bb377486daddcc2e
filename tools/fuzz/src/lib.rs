//! Broken inputs for everything that reads files and texts of strangers.
//!
//! A [`Surface`] makes inputs, most of them broken, and checks the promises of
//! the program for any input: an answer or an error, never a panic; memory and
//! work within a multiple of the input's length; and no wrong success, such as
//! a changed cache entry that still loads. A seed and a number determine each
//! input.
//!
//! ```text
//! cargo xtask fuzz --inputs 1000000 --seed 1
//! cargo xtask fuzz --surface pack --seed 1 --first 812 --inputs 1
//! cargo xtask fuzz --file tools/fuzz/regressions/pack/path_in_a_layer
//! ```

mod heap;
mod mutate;
pub mod surface;
mod watch;

pub use surface::{Surface, surface, surfaces};
pub use watch::{Fault, Watch};

use moesaic_spec::testing::SampleRng;

/// Counts the allocations of the suite, and of every program that links it.
#[global_allocator]
static HEAP: heap::Counted = heap::Counted;

/// Returns the input of a number, which does not depend on other numbers.
pub fn input(surface: &mut dyn Surface, seed: u64, number: u64) -> Vec<u8> {
    let name = surface.name().bytes();
    let own = name.fold(seed, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    let mut rng = SampleRng::new(own.wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    surface.input(&mut rng)
}
