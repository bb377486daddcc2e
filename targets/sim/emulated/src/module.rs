//! Loaded kernels and their launch.

use crate::program::Request;
use crate::state::DeviceState;
use moesaic_kernel::Entry;
use moesaic_target::{
    Arg, ArgBlock, Artifact, DeviceError, FunctionId, LaunchDims, LaunchReason, LoadReason, Module,
    Scratch, SharedError, SignatureError,
};
use object::{Object, ObjectSymbol};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;

/// A binary that the linker of programs did not write.
#[derive(Debug, thiserror::Error)]
#[error("it is not a program: {0}")]
struct NotAProgram(#[source] object::Error);

/// The file of a program and the folder that holds it.
struct Program {
    path: PathBuf,
    _folder: Scratch,
}

/// A program of kernels, started when one of them is launched.
pub(crate) struct EmulatedModule {
    entries: Vec<(Entry, u64)>,
    device: Arc<DeviceState>,
    program: Program,
}

impl EmulatedModule {
    pub(crate) fn load(
        artifact: &Artifact,
        entries: &[Entry],
        device: Arc<DeviceState>,
    ) -> Result<EmulatedModule, DeviceError> {
        let kernel = entries.first().map_or("(no entry)", |entry| &entry.symbol);
        let refuse = |reason| DeviceError::Load {
            kernel: kernel.to_string(),
            reason,
        };
        let file = object::File::parse(&*artifact.binary);
        let file =
            file.map_err(|error| refuse(LoadReason::Binary(SharedError::new(NotAProgram(error)))))?;
        let found = entries.iter().map(|entry| {
            let missing = || {
                let symbol = entry.symbol.clone();
                refuse(SignatureError::Missing { symbol }.into())
            };
            let address = address(&file, &entry.symbol).ok_or_else(missing)?;
            Ok((entry.clone(), address))
        });
        let entries = found.collect::<Result<_, DeviceError>>()?;
        let program =
            on_disk(&artifact.binary).map_err(|error| refuse(LoadReason::NoPlace(error.into())))?;
        Ok(EmulatedModule {
            entries,
            device,
            program,
        })
    }
}

impl Drop for EmulatedModule {
    fn drop(&mut self) {
        self.device.stop(&self.program.path);
    }
}

fn address(file: &object::File<'_>, symbol: &str) -> Option<u64> {
    let mut symbols = file.symbols().filter(ObjectSymbol::is_definition);
    let found = symbols.find(|candidate| candidate.name() == Ok(symbol))?;
    Some(found.address())
}

/// Writes a program to a closed file, because a program cannot run while its
/// file is open for writing.
fn on_disk(binary: &[u8]) -> std::io::Result<Program> {
    let folder = Scratch::new()?;
    let path = folder.path().join("program");
    std::fs::write(&path, binary)?;
    std::fs::set_permissions(&path, Permissions::from_mode(0o700))?;
    Ok(Program {
        path,
        _folder: folder,
    })
}

impl Module for EmulatedModule {
    fn function(&self, symbol: &str) -> Result<FunctionId, DeviceError> {
        FunctionId::find(self.entries.iter().map(|(e, _)| &*e.symbol), symbol)
    }

    unsafe fn run(
        &self,
        function: FunctionId,
        dims: LaunchDims,
        args: &[Arg],
    ) -> Result<(), DeviceError> {
        let (entry, address) = &self.entries[function.0];
        let refuse = |reason| DeviceError::Launch {
            kernel: entry.symbol.clone(),
            reason,
        };
        // Only for its checks of number and type; the values travel in the
        // request.
        ArgBlock::new(entry, args)?;
        let [x, y] = dims.grid;
        let blocks = x.checked_mul(y).and_then(|n| i64::try_from(n).ok());
        let blocks = blocks.ok_or_else(|| {
            refuse(LaunchReason::LargeGrid {
                grid: [x, y],
                most: None,
            })
        })?;
        if blocks == 0 {
            return Ok(());
        }
        // Pointers stay as they are: the program maps the memory at the same
        // address at which the device hands it out.
        let values: Vec<u64> = args.iter().map(value).collect();
        let scratch = self.device.scratch(dims.shared_bytes as usize)?;
        let request = Request {
            entry: *address,
            blocks: [0, blocks],
            grid_x: x as i64,
            scratch: scratch.as_ref().map_or(0, |owner| owner.address),
            values: &values,
        };
        self.device
            .run(&self.program.path, &request)
            .map_err(|error| refuse(LaunchReason::Simulator(SharedError::new(error))))
    }
}

/// Returns an argument as its bytes lie in memory, little-endian on every
/// machine here.
fn value(arg: &Arg) -> u64 {
    match arg {
        Arg::Ptr(address) | Arg::TensorMap { base: address, .. } => address.0,
        Arg::I64(value) => value.cast_unsigned(),
        Arg::F32(value) => u64::from(value.to_bits()),
    }
}
