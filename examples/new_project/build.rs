//! Compiles the layer's kernels while Cargo builds the program, so that it starts without a
//! compiler.

use moesaic::{CompileOptions, Compilers, LayerSpec, Store, Training, resolve_target};
use moesaic::aot::{KernelOutcome, precompile};
use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::{env, fs};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=layer.toml");
    let spec = LayerSpec::from_toml(&fs::read_to_string("layer.toml")?)?;
    let folder = Path::new(&env::var("OUT_DIR")?).join("kernels");
    let store = Arc::new(Store::open(&folder));

    let training = Some(Training::default());
    let job = Compilers::default().job(&spec, resolve_target("cpu")?, training)?;
    for row in precompile(&[job], &store, &CompileOptions::default(), &|_| {})? {
        if let KernelOutcome::Failed(error) = row.outcome {
            return Err(error.into());
        }
    }
    println!("cargo::rustc-env=KERNELS={}", folder.display());
    Ok(())
}
