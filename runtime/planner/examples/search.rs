//! A search of the size that docs/SCALE.md gives: 2,048 ranks, 256 experts, training.
//!
//! ```sh
//! cargo build --release -p moesaic-planner --example search
//! /usr/bin/time -v target/release/examples/search 1.2 2048   # exponent of Zipf, ranks
//! ```

use moesaic_plan::{CommDtype, ShadowModel, Training};
use moesaic_planner::{RoutedRows, Scenario, Space, published, search};
use moesaic_spec::LayerSpec;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let spec = LayerSpec::from_toml(
        "shape = { model_dim = 7168, hidden_dim = 2048, experts = 256, top_k = 8 }
         precision = { weights = \"bf16\", activations = \"bf16\" }",
    )?;
    let skew = std::env::args()
        .nth(1)
        .map_or(Ok(0.0), |skew| skew.parse())?;
    let scenario = Scenario {
        routing: RoutedRows::zipf(4096, 256, 8, skew)?,
        placement: None,
        shadow_model: ShadowModel::of(&spec),
        spec,
        machine: published("h100-ib")?,
        world: std::env::args()
            .nth(2)
            .map_or(Ok(2048), |world| world.parse())?,
        training: Some(Training::default()),
    };
    let space = Space {
        comm_dtypes: vec![CommDtype::Unchanged, CommDtype::Fp8],
        ..Space::default()
    };
    let ranked = search(&scenario, &space)?;
    println!("{} configurations", ranked.simulated);
    for best in ranked.best.iter().take(5) {
        let ms = best.seconds * 1e3;
        println!("{ms:.2} ms: {:?} {}", best.mesh, best.strategy);
    }
    Ok(())
}
