//! The kit has to notice a device on which nothing happens. Every kernel is
//! really compiled, so this also says that all of them assemble.

use moesaic_kernel::{Entry, Target};
use moesaic_probe::bench::Bench;
use moesaic_probe::report::Outcome;
use moesaic_target::{
    Arg, Artifact, Buffer, Compiler, Device, DeviceError, DeviceInfo, LaunchDims, Module, Ptr,
};
use moesaic_toolchain::{Kind, Registry, install, nvrtc};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Keeps what is uploaded, and runs nothing.
struct Idle {
    info: DeviceInfo,
    memory: Mutex<HashMap<u64, Vec<u8>>>,
}

struct IdleModule;

impl Module for IdleModule {
    unsafe fn launch(&self, _: &str, _: LaunchDims, _: &[Arg]) -> Result<(), DeviceError> {
        Ok(())
    }
}

impl Device for Idle {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn load(&self, artifact: &Artifact, entries: &[Entry]) -> Result<Arc<dyn Module>, DeviceError> {
        for entry in entries {
            assert!(
                artifact.report.kernel(&entry.symbol).is_some(),
                "{}",
                entry.symbol
            );
        }
        Ok(Arc::new(IdleModule))
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        let mut memory = self.memory.lock().unwrap();
        let at = (memory.len() as u64 + 1) << 32;
        memory.insert(at, vec![0; bytes]);
        Ok(Buffer::new(Ptr(at), bytes, Box::new(())))
    }

    fn upload(&self, bytes: &[u8], buffer: &Buffer, offset: usize) -> Result<(), DeviceError> {
        let mut memory = self.memory.lock().unwrap();
        let all = memory.get_mut(&buffer.ptr().0).unwrap();
        all[offset..offset + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn download(
        &self,
        buffer: &Buffer,
        offset: usize,
        bytes: &mut [u8],
    ) -> Result<(), DeviceError> {
        let memory = self.memory.lock().unwrap();
        bytes.copy_from_slice(&memory[&buffer.ptr().0][offset..offset + bytes.len()]);
        Ok(())
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}

fn bench(target: &str) -> Bench {
    let mut registry = Registry::open().unwrap();
    install(&mut registry, &[Kind::Cuda], &mut |_| {}).unwrap_or_else(|error| panic!("{error}"));
    let compiler = nvrtc(&registry).unwrap_or_else(|error| panic!("{error}"));
    let target: Target = target.parse().unwrap();
    assert!(compiler.targets().contains(&target));
    let info = DeviceInfo {
        name: "idle".to_string(),
        target,
        units: 1,
        memory_bytes: None,
    };
    let memory = Mutex::default();
    Bench::new(target, Box::new(compiler), Arc::new(Idle { info, memory }))
}

#[test]
fn a_device_that_does_nothing_is_noticed() {
    let report = moesaic_probe::run(&bench("cuda:sm_90a"), |_| ());
    for row in &report.rows {
        assert!(matches!(row.outcome, Outcome::Differs(_)), "{row}");
    }
    assert!(!report.is_clean() && report.rows.len() > 100, "{report}");
}

#[test]
fn what_an_older_gpu_lacks_is_said() {
    let report = moesaic_probe::run(&bench("cuda:sm_80"), |_| ());
    let skipped = report
        .rows
        .iter()
        .filter(|row| matches!(row.outcome, Outcome::NotRun(_)));
    let text: Vec<String> = skipped.map(ToString::to_string).collect();
    assert!(text.len() > 5, "{report}");
    assert!(
        text[0].contains("not run: needs sm_90, this is sm_80"),
        "{}",
        text[0]
    );
    let failed = |row: &&moesaic_probe::report::Row| matches!(row.outcome, Outcome::Failed(_));
    assert!(!report.rows.iter().any(|row| failed(&row)), "{report}");
}
