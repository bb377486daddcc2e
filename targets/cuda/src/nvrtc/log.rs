//! Reads the assembler's log, the only place that tells of spills.

/// A function that spills registers to local memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spill {
    /// The kernel, or a function it calls.
    pub function: String,
    /// Bytes stored to local memory per thread.
    pub bytes: u32,
}

/// Returns every function of the log with its spilled bytes, zero included.
///
/// The assembler names a function on one line and its stack on the next:
/// `Function properties for axpy`, then `0 bytes stack frame, 0 bytes spill
/// stores, 0 bytes spill loads`.
pub fn spills(log: &str) -> Vec<Spill> {
    let mut function = None;
    let mut spills = Vec::new();
    for line in log.lines() {
        if let Some((_, name)) = line.split_once("Function properties for ") {
            function = Some(name.trim().to_string());
        } else if let (Some(bytes), Some(name)) = (spill_stores(line), function.take()) {
            spills.push(Spill {
                function: name,
                bytes,
            });
        }
    }
    spills
}

fn spill_stores(line: &str) -> Option<u32> {
    let (before, _) = line.split_once(" bytes spill stores")?;
    before.rsplit([' ', ',']).next()?.parse().ok()
}

/// The prefix of ptxas' warnings about text that it cannot follow: C7504 to
/// C7508 report that `setmaxnreg` is ignored, the codes after them that wgmma
/// is serialised.
const LOSS: &str = "Potential Performance Loss";

/// Returns the first of those lines.
pub fn performance_loss(log: &str) -> Option<String> {
    let line = log.lines().find(|line| line.contains(LOSS))?;
    Some(line.trim().to_string())
}

/// Returns the log without the lines that every compile has.
pub fn worth_reading(log: &str) -> String {
    let keep = |line: &&str| !is_routine(line);
    log.lines()
        .filter(keep)
        .collect::<Vec<_>>()
        .join("\n")
        .trim()
        .to_string()
}

fn is_routine(line: &str) -> bool {
    let continued = line.contains(" bytes stack frame, ");
    let info = line.starts_with("ptxas info") && !line.contains(LOSS);
    continued || info
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A log of NVRTC 13.0.
    const LOG: &str = "\
ptxas warning : Registers are spilled to local memory in function 'spilly', 1692 bytes spill stores, 1928 bytes spill loads
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ill formed pipeline stage in the function 'spilly'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'spilly' for 'sm_80'
ptxas info    : Function properties for spilly
ptxas         .     760 bytes stack frame, 1692 bytes spill stores, 1928 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 760 bytes cumulative stack size
ptxas info    : Function properties for calm
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compile time = 46.444 ms
";

    #[test]
    fn spills_belong_to_their_functions() {
        let expected = [("spilly", 1692), ("calm", 0)];
        let found = spills(LOG);
        let found = found
            .iter()
            .map(|spill| (spill.function.as_str(), spill.bytes));
        assert_eq!(found.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn only_remarkable_lines_stay() {
        let lines = worth_reading(LOG);
        assert_eq!(lines.lines().count(), 2, "{lines}");
        assert!(lines.starts_with("ptxas warning : Registers"), "{lines}");
    }

    #[test]
    fn losses_are_found() {
        let note = performance_loss(LOG).unwrap();
        assert!(note.ends_with("ill formed pipeline stage in the function 'spilly'"));
        assert_eq!(performance_loss("ptxas info : 0 bytes gmem"), None);
        // Lines about a call into another unit, and about a kernel without
        // launch bounds.
        for line in [
            "ptxas info    : (C7504) Potential Performance Loss: 'setmaxnreg' ignored to maintain \
             compatibility across compilation units.",
            "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to \
             determine register count at entry.",
        ] {
            let log = format!("ptxas info    : 0 bytes gmem\n{line}\n");
            assert_eq!(performance_loss(&log).as_deref(), Some(line));
            assert_eq!(worth_reading(&log), line);
        }
    }
}
