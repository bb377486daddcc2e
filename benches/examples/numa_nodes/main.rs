//! Shows where the packed weights of a layer lie on a machine with several NUMA nodes, and which
//! node reads them.
//!
//! ```sh
//! cargo run --release -p moesaic-benches --example numa_nodes              # threads that the system moves
//! cargo run --release -p moesaic-benches --example numa_nodes -- --pin     # each stays on one processor
//! ```
//!
//! It makes a layer in f32 and in bf16, asks Linux for the node of every page of the packed
//! weights, and watches passes of 1, 8 and 512 tokens: which node reads each 2 MB first. The last
//! number of a line is a digest of the output bytes. `--target cpu:avx2` generates for another
//! instruction set, and `--strict` takes kernels from the cache only. On a machine with one node it
//! reports that; on systems other than Linux it reports that it cannot tell.

#[cfg(target_os = "linux")]
mod pages;
#[cfg(target_os = "linux")]
mod report;
#[cfg(target_os = "linux")]
mod watch;

use std::error::Error;

/// The command's options.
#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "nothing is done"))]
pub struct Args {
    pin: bool,
    strict: bool,
    target: String,
}

fn main() -> Result<(), Box<dyn Error>> {
    run(&parse(std::env::args().skip(1))?)
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Args, String> {
    let mut args = Args {
        pin: false,
        strict: false,
        target: "cpu".to_string(),
    };
    while let Some(word) = words.next() {
        match word.as_str() {
            "--pin" => args.pin = true,
            "--strict" => args.strict = true,
            "--target" => args.target = words.next().ok_or("--target NAME")?,
            other => return Err(format!("{other} is none of --pin, --strict, --target NAME")),
        }
    }
    Ok(args)
}

#[cfg(target_os = "linux")]
fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    report::run(args)
}

#[cfg(not(target_os = "linux"))]
fn run(_: &Args) -> Result<(), Box<dyn Error>> {
    println!("only Linux says on which NUMA node a page lies; nothing was done");
    Ok(())
}
