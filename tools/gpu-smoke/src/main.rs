//! What a machine with a GPU and nothing else runs. `cargo xtask gpu-smoke` puts this
//! program, its kernels and its data into a folder; `run.sh` there runs all steps.

mod commands;
mod compile;
mod items;
mod launches;
mod layers;
mod limits;
mod open;
mod oracles;
mod probe;
mod suite;
mod timing;
mod watch;

// What the project's tests run on simulators, as data.
#[allow(dead_code, reason = "tests and benches use the rest")]
#[path = "../../../tests/conformance/case.rs"]
mod case;
#[allow(dead_code, reason = "tests and benches use the rest")]
#[path = "../../../tests/conformance/cases.rs"]
mod cases;
#[path = "../../../tests/conformance/compare.rs"]
mod compare;
#[allow(dead_code, reason = "tests and benches use the rest")]
#[path = "../../../tests/training/helloworld.rs"]
mod helloworld;
#[path = "../../../tests/conformance/sampled.rs"]
mod sampled;
#[allow(dead_code, reason = "tests and benches use the rest")]
#[path = "../../../tests/training/torch_random.rs"]
mod torch_random;
#[allow(dead_code, reason = "tests and benches use the rest")]
#[path = "../../../tests/conformance/trained.rs"]
mod trained;

// What the bench of layers on CPUs and its peers talk with.
#[path = "../../../benches/layer/answer.rs"]
mod answer;
#[allow(dead_code, reason = "tests and benches use the rest")]
#[path = "../../../benches/layer/data.rs"]
mod data;
#[path = "../../../benches/layer/gradient.rs"]
mod gradient;
#[path = "../../../benches/layer/pass.rs"]
mod pass;
#[allow(dead_code, reason = "tests and benches use the rest")]
#[path = "../../../benches/layer/peer.rs"]
mod peer;
#[allow(dead_code, reason = "tests and benches use the rest")]
#[path = "../../../benches/layer/shapes.rs"]
mod shapes;

#[allow(dead_code, reason = "the bench uses the rest")]
#[path = "../../../benches/launch/specs.rs"]
mod specs;
#[path = "../../../benches/layer/work.rs"]
mod work;

#[path = "../../../targets/cuda/examples/device_check/cuda.rs"]
mod cuda;
#[path = "../../../targets/api/tests/device_check/mod.rs"]
mod device_check;

use case::Case;
use clap::Parser;
use std::error::Error;
use std::process::ExitCode;

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

/// A step could not begin: no driver, no GPU, no kernels.
const ABSENT: u8 = 2;

/// Something did not run for want of time, and nothing failed.
const CUT: u8 = 4;

fn main() -> ExitCode {
    match commands::Command::parse().run() {
        Ok(code) => code,
        Err(error) => {
            println!("error: {error}");
            let absent = error.is::<open::Absent>();
            ExitCode::from(if absent { ABSENT } else { 1 })
        }
    }
}
