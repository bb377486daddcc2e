//! Prints the time of a warm hit: `cargo run --release -p moesaic-cache --example hit`.

use moesaic_cache::{KernelKey, KeyParts, Store, StoredKernel};
use moesaic_kernel::{
    CpuIsa, DType, Entry, KernelSource, Language, Launch, Param, Size, Stem, Target,
};
use moesaic_target::{Artifact, ArtifactReport, KernelReport};
use std::error::Error;
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?;
    let store = Store::open(dir.path());
    for kilobytes in [4_usize, 40, 400] {
        let source = source(kilobytes);
        let parts = KeyParts {
            target: source.target,
            config: "{}",
            source: &source.text,
            flags: "",
            compiler: "gcc 12",
        };
        let binary = (0..kilobytes << 10).map(|i| ((i * i) >> 3) as u8).collect();
        let kernels = vec![KernelReport::default(); source.entries.len()];
        let artifact = Artifact {
            binary,
            report: ArtifactReport {
                kernels,
                ..ArtifactReport::default()
            },
        };
        let put = time(20, || {
            store
                .put(
                    &KernelKey::new(&parts),
                    &source,
                    &StoredKernel::new(&source, artifact.clone()),
                )
                .is_ok()
        });
        let key = time(2000, || KernelKey::new(&parts));
        let hash = KernelKey::new(&parts);
        let get = time(2000, || store.get(&hash).is_some());
        println!("{kilobytes:4} KB: key {key:.1} us, hit {get:.1} us, put {put:.0} us");
    }
    Ok(())
}

/// Returns a kernel of two entries with ten parameters each and `kilobytes` KB of text.
fn source(kilobytes: usize) -> KernelSource {
    let params = (0..10).map(|i| Param::read(&format!("tensor_{i}"), DType::F32, "[tokens, 2048]"));
    let entry = Entry {
        symbol: "grouped_gemm_up".to_string(),
        summary: "One block makes one tile of the product.".to_string(),
        params: params.collect(),
        launch: Launch {
            grid: [Size::Tokens, Size::Const(1)],
            threads: 1,
            shared_bytes: 0,
            cluster: 1,
            dependent: false,
        },
    };
    KernelSource {
        stem: Stem::GroupedGemm,
        name: format!("grouped_gemm_{kilobytes}"),
        target: Target::Cpu(CpuIsa::Avx2),
        language: Language::C,
        text: "float x = 1.0f; /* a line */\n".repeat(700),
        config: "{}".to_string(),
        entries: vec![entry.clone(), entry],
    }
}

/// Returns the median run time in microseconds.
fn time<T>(runs: usize, mut run: impl FnMut() -> T) -> f64 {
    let mut times: Vec<f64> = (0..runs)
        .map(|_| {
            let started = Instant::now();
            std::hint::black_box(run());
            started.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[runs / 2]
}
