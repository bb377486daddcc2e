//! Losses and gradients of routers on this CPU.

use moesaic_harness::cpu::host;
use moesaic_harness::router_bwd::{Router, every_loss, sample};
use moesaic_kernel::{CpuIsa, Target};

#[test]
fn routers_of_every_kind() {
    let isa = Target::Cpu(host());
    for spec in (0..80).filter_map(sample) {
        let router = Router::new(&spec, isa);
        for tokens in [0, 1, 70] {
            router.check(tokens, false);
        }
        router.check(130, true);
    }
}

#[test]
fn losses_of_every_kind() {
    for (i, spec) in every_loss().into_iter().enumerate() {
        let isa = [CpuIsa::Portable, host()][i % 2];
        let router = Router::new(&spec, Target::Cpu(isa));
        router.check(150, false);
        router.check(37, true);
    }
}
