//! Holds `docs/internals/architectures.md` to the table of GPU architectures; `cargo xtask bless`
//! rewrites it.

use moesaic_kernel::{ArchCaps, MatrixUnit, Target};
use std::path::Path;

const BEGIN: &str = "<!-- `cargo xtask bless` writes what follows from the table. -->\n";

const HEAD: &str = "\
| architecture | GPUs | multiplies by | shared memory of a block, KB | banks | wave | others |
|---|---|---|---:|---:|---:|---|
";

fn matrix(unit: MatrixUnit) -> &'static str {
    match unit {
        MatrixUnit::None => "–",
        MatrixUnit::Mma => "`mma.sync`",
        MatrixUnit::Wgmma => "`wgmma`, `mma.sync`",
        MatrixUnit::Mfma(mfma) if !mfma.bf16 => "– (MFMA without bf16 of full depth)",
        MatrixUnit::Mfma(mfma) if mfma.wide => "MFMA of eight elements of a lane",
        MatrixUnit::Mfma(mfma) if mfma.flushes => "MFMA, subnormal halves as zero",
        MatrixUnit::Mfma(_) => "MFMA",
        MatrixUnit::Wmma => "WMMA",
    }
}

fn row(target: Target, caps: &ArchCaps) -> String {
    let others = [
        (caps.fast_tf32, "fast tf32".to_string()),
        (caps.clusters, "clusters, TMA".to_string()),
        (caps.dependent_launches, "overlapping launches".to_string()),
        (caps.dies > 1, format!("{} dies", caps.dies)),
        (caps.clang > 14, format!("clang {}", caps.clang)),
    ];
    let others: Vec<String> = others.into_iter().filter(|o| o.0).map(|o| o.1).collect();
    format!(
        "| {} | {} | {} | {} | {} | {} | {} |\n",
        target.arch(),
        caps.gpus.join(", "),
        matrix(caps.matrix),
        caps.block_shared >> 10,
        caps.shared_banks,
        caps.wave,
        others.join(", "),
    )
}

#[test]
fn the_page_has_every_architecture() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/internals/architectures.md");
    let page = std::fs::read_to_string(&path).expect("the page");
    let (before, listed) = page.split_once(BEGIN).expect("where the table begins");
    let real = Target::all()
        .into_iter()
        .filter(|target| target.hardware() == *target);
    let rows = real.filter_map(|target| Some(row(target, target.caps()?)));
    let wanted = format!("\n{HEAD}{}", rows.collect::<String>());
    if std::env::var_os("BLESS").is_some() {
        return std::fs::write(&path, [before, BEGIN, &wanted].concat()).expect("a writable tree");
    }
    assert_eq!(listed, wanted, "not as in the code: cargo xtask bless");
}
