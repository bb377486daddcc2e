//! Real installations into the user's cache, which the project's other tests use too.

use moesaic_kernel::Target;
use moesaic_target::Compiler;
use moesaic_toolchain::{InstallStep, Registry, ToolKind, doctor, install};
use std::time::Instant;

fn installed() -> Registry {
    let mut registry = Registry::open().unwrap();
    install(&mut registry, &ToolKind::ALL, &mut |_| {}).unwrap_or_else(|error| panic!("{error}"));
    registry
}

fn target(name: &str) -> Target {
    name.parse().unwrap()
}

#[test]
fn everything_installs_and_registers() {
    let registry = installed();
    let kinds = registry
        .list()
        .iter()
        .map(|tool| tool.kind)
        .collect::<Vec<_>>();
    assert_eq!(kinds, ToolKind::ALL);
    for tool in registry.list() {
        assert!(registry.path(tool).is_file());
        assert!(
            !tool.file.is_absolute(),
            "a moved cache must stay usable: {}",
            tool.file.display()
        );
    }
}

#[test]
fn a_second_install_is_quick_and_says_so() {
    let mut registry = installed();
    let mut steps = Vec::new();
    let start = Instant::now();
    install(&mut registry, &ToolKind::ALL, &mut |step| {
        steps.push(step.clone())
    })
    .unwrap();
    assert!(start.elapsed().as_millis() < 500, "{:?}", start.elapsed());
    assert_eq!(steps.len(), ToolKind::ALL.len());
    assert!(
        steps
            .iter()
            .all(|step| matches!(step, InstallStep::AlreadyThere(_))),
        "{steps:?}"
    );
}

#[test]
fn the_constructors_give_working_compilers() {
    let registry = installed();
    let nvrtc = moesaic_toolchain::nvrtc(&registry).unwrap();
    let rocm = moesaic_toolchain::rocm(&registry).unwrap();
    for name in ["cuda:sm_80", "cuda:sm_90a", "cuda:sm_100a", "cuda:sm_120a"] {
        assert!(
            nvrtc.targets().contains(&target(name)),
            "{name}: {}",
            nvrtc.name()
        );
    }
    for name in ["rocm:gfx90a", "rocm:gfx942", "rocm:gfx950", "rocm:gfx1100"] {
        assert!(
            rocm.targets().contains(&target(name)),
            "{name}: {}",
            rocm.name()
        );
    }
    assert_eq!(moesaic_toolchain::c(&registry).unwrap().backend(), "cpu");
}

#[test]
fn the_installed_mpi_is_found_by_the_doctor_where_the_machine_has_none() {
    let registry = installed();
    let mpi = moesaic_toolchain::mpi(&registry).unwrap();
    assert!(mpi.launcher.is_file() && mpi.library.is_file(), "{mpi:?}");
    let findings = doctor(&registry);
    let finding = findings.iter().find(|f| f.subject == "MPI library");
    let finding = finding.unwrap();
    let found = finding.found.as_deref().unwrap();
    assert!(found.contains(", by "), "{finding:?}");
    assert!(finding.place.is_some() && finding.advice.is_empty());
}

#[test]
fn opening_the_registered_clang_starts_no_process() {
    let real = installed();
    let facts = real.get(ToolKind::Rocm).unwrap().clang.clone().unwrap();
    let compiler = moesaic_toolchain::rocm(&real).unwrap();
    assert_eq!(compiler.facts(), Some(&facts));
    assert_eq!(compiler.name(), real.get(ToolKind::Rocm).unwrap().name);
}

#[test]
fn the_doctor_names_compilers_places_and_targets() {
    let findings = doctor(&installed());
    // The machine decides which libraries exist, but advice must always be given.
    for subject in ["NCCL library", "RCCL library"] {
        let finding = findings.iter().find(|finding| finding.subject == subject);
        let finding = finding.unwrap();
        let missing = finding.found.is_none();
        assert_eq!(missing, !finding.tried.is_empty(), "{finding:?}");
        assert_eq!(
            missing,
            finding.advice.contains("MOESAIC_NCCL"),
            "{finding:?}"
        );
    }
    for subject in ["C compiler", "CUDA compiler", "ROCm compiler"] {
        let finding = findings
            .iter()
            .find(|finding| finding.subject == subject)
            .unwrap();
        assert!(
            finding.found.is_some() && finding.place.is_some(),
            "{finding:?}"
        );
        assert!(
            !finding.targets.is_empty() && finding.tried.is_empty(),
            "{finding:?}"
        );
    }
}

/// An empty cache next to the real one: existing folders work, so they are adopted and nothing is
/// fetched.
#[test]
fn a_lost_or_damaged_registry_is_rebuilt_without_a_download() {
    let real = installed();
    let home = tempfile::tempdir_in(real.folder()).unwrap();
    let folder = home.path().join("toolchain");
    std::fs::create_dir(&folder).unwrap();
    for tool in real.list() {
        let name = tool.file.parent().unwrap();
        let _ = std::os::unix::fs::symlink(real.folder().join(name), folder.join(name));
    }
    std::fs::write(
        folder.join("registry.json"),
        "{ \"format\": 1, \"tools\": [",
    )
    .unwrap();
    let mut registry = Registry::at(home.path());
    assert!(registry.list().is_empty());
    let mut steps = Vec::new();
    install(&mut registry, &ToolKind::ALL, &mut |step| {
        steps.push(step.to_string())
    })
    .unwrap();
    assert!(
        steps.iter().all(|step| !step.contains("downloading")),
        "{steps:?}"
    );
    assert_eq!(Registry::at(home.path()).list().len(), ToolKind::ALL.len());
}

#[test]
fn a_tool_that_was_cut_short_is_not_offered() {
    let real = installed();
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("toolchain");
    std::fs::create_dir(&folder).unwrap();
    std::fs::copy(
        real.folder().join("registry.json"),
        folder.join("registry.json"),
    )
    .unwrap();
    let tool = real.get(ToolKind::Rocm).unwrap();
    let file = folder.join(&tool.file);
    std::fs::create_dir(file.parent().unwrap()).unwrap();
    std::fs::write(&file, "short").unwrap();
    assert_eq!(Registry::at(home.path()).get(ToolKind::Rocm), None);
    assert_eq!(Registry::at(home.path()).get(ToolKind::Cuda), None);
}
