//! Loads of AMD's decode kernels in their machine code: loads that are in flight before one is
//! waited for.

use crate::gpu_compile::{deepseek_v3, mixtral, qwen3};
use moesaic_emit::emit;
use moesaic_harness::kept::Kept;
use moesaic_kernel::Target;
use moesaic_plan::{KernelPlan, PlanOptions, Training, plan};
use moesaic_target::{CompileOptions, Compiler};
use moesaic_toolchain::testing;

/// The loads from memory that each wait leaves in flight, and whether it follows a load of 16
/// bytes at once, in a code object of gfx9. A load is two words; a wait has its count in bits 0 to
/// 3, 14 and 15.
fn waits(code: &[u8]) -> Vec<(u32, bool)> {
    let words: Vec<u32> = code
        .chunks_exact(4)
        .map(|word| u32::from_le_bytes(word.try_into().unwrap()))
        .collect();
    let is_load = |word: u32| word & 0xffff_c000 == 0xdc5c_8000;
    (2..words.len())
        .filter(|&i| words[i] >> 16 == 0xbf8c)
        .map(|i| (words[i] & 15 | words[i] >> 10 & 48, is_load(words[i - 2])))
        .collect()
}

/// Decode kernels live from loads in flight: no load is waited for at once, and of the 48
/// that fit most are there while some are multiplied.
#[test]
fn few_rows_keep_loads_under_way() {
    let compiler = Kept::new(testing::rocm());
    for arch in ["gfx90a", "gfx942", "gfx950"] {
        let target: Target = format!("rocm:{arch}").parse().unwrap();
        for spec in [mixtral(), qwen3(), deepseek_v3()] {
            let plan = plan(&spec, target, &PlanOptions::default()).unwrap();
            let decode = |kernel: &&KernelPlan| kernel.family() == Some("mfma_decode");
            let kernels: Vec<_> = plan.kernels.iter().filter(decode).collect();
            assert_eq!(kernels.len(), 2, "{target}");
            for kernel in kernels {
                let source = emit(kernel, target).unwrap();
                let artifact = compiler.compile(&source, &CompileOptions::default());
                let waits = waits(&artifact.unwrap_or_else(|error| panic!("{error}")).binary);
                let at_once = waits.iter().any(|&(left, loaded)| loaded && left == 0);
                assert!(!at_once, "{} for {target}: {waits:?}", source.name);
                let ahead = waits.iter().filter(|(left, _)| (36..48).contains(left));
                assert!(
                    ahead.count() >= 8,
                    "{} for {target}: {waits:?}",
                    source.name
                );
            }
        }
    }
}

/// The most loads that are asked for one after the other with no wait between, in a code object of
/// gfx9.
fn asked_together(code: &[u8]) -> usize {
    let words = code.chunks_exact(4);
    let words = words.map(|word| u32::from_le_bytes(word.try_into().unwrap()));
    let (mut most, mut here) = (0, 0);
    for word in words {
        // Loads from global memory, of a byte to 16; a wait that leaves 63 is for something else.
        let is_load = word & 0xfc00_c000 == 0xdc00_8000 && (16..24).contains(&(word >> 18 & 127));
        let is_wait = word >> 16 == 0xbf8c && (word & 15 | word >> 10 & 48) < 63;
        here = if is_wait {
            0
        } else {
            here + usize::from(is_load)
        };
        most = most.max(here);
    }
    most
}

/// Other loads that decode calls wait for: the rows that a token adds up, and the tokens that the router
/// multiplies.
#[test]
fn rows_of_a_token_are_under_way_together() {
    let compiler = Kept::new(testing::rocm());
    // Rows of eight slots, with the two loads of the router's share; sixteen parts of a token.
    let kernels = [("combine", 8), ("dispatch_bwd", 10), ("route", 16)];
    for arch in ["gfx90a", "gfx942", "gfx950"] {
        let target: Target = format!("rocm:{arch}").parse().unwrap();
        for spec in [qwen3(), deepseek_v3()] {
            let forward = plan(&spec, target, &PlanOptions::default()).unwrap();
            let training = PlanOptions::training(Training::default());
            let both = [forward, plan(&spec, target, &training).unwrap()];
            for (name, least) in kernels {
                let mut all = both.iter().flat_map(|plan| &plan.kernels);
                let kernel = all.find(|kernel| kernel.name == name);
                let source = emit(kernel.expect("the layer has it"), target).unwrap();
                let artifact = compiler.compile(&source, &CompileOptions::default());
                let artifact = artifact.unwrap_or_else(|error| panic!("{error}"));
                let together = asked_together(&artifact.binary);
                assert!(together >= least, "{name} for {target}: {together}");
            }
        }
    }
}
