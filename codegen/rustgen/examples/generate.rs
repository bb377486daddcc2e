//! Prints the Rust of a spec file:
//! `cargo run -p moesaic-rustgen --example generate examples/specs/mixtral-8x7b.toml`

use moesaic_rustgen::{GenerateOptions, generate_source};
use moesaic_spec::LayerSpec;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args()
        .nth(1)
        .ok_or("usage: generate <spec.toml>")?;
    let spec = LayerSpec::from_toml(&std::fs::read_to_string(path)?)?;
    print!("{}", generate_source(&spec, &GenerateOptions::default())?);
    Ok(())
}
