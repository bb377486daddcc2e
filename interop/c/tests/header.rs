//! The header is what cbindgen makes of the sources.

use std::path::Path;
use std::process::Command;

#[test]
fn the_header_is_that_of_the_sources() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).unwrap();
    let builder = cbindgen::Builder::new().with_config(config);
    let sources = [
        "status", "tensors", "info", "engine", "spec", "ranks", "options", "layer", "calls",
        "gates", "replay",
    ];
    let builder = sources.iter().fold(builder, |builder, name| {
        builder.with_src(folder.join(format!("src/{name}.rs")))
    });
    let mut made = Vec::new();
    builder.generate().unwrap().write(&mut made);
    let made = without_safety(&String::from_utf8(made).unwrap());
    let path = folder.join("include/moesaic.h");
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        made == found,
        "include/moesaic.h is not of the sources: BLESS=1 cargo test --test header"
    );
}

/// C from C99 and C++ from C++11 read `moesaic.h`, and C++ from C++17 `moesaic.hpp`, without a
/// warning.
#[test]
fn the_headers_alone_compile_without_a_warning() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let cases = [
        ("cc", "c", "moesaic.h", vec!["c99", "c11", "c17"]),
        ("c++", "c++", "moesaic.h", vec!["c++11", "c++17", "c++20"]),
        ("c++", "c++", "moesaic.hpp", vec!["c++17", "c++20"]),
    ];
    for (compiler, language, header, standards) in cases {
        for standard in standards {
            let mut command = Command::new(compiler);
            command.args(["-Wall", "-Wextra", "-Wshadow", "-pedantic", "-Werror"]);
            command.args(["-fsyntax-only", "-x", language, "-include", header]);
            command.arg(format!("-std={standard}")).arg("/dev/null");
            let output = command.current_dir(&folder).output().unwrap();
            let text = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{header} by {standard}: {text}");
        }
    }
}

/// Leaves out the sections `# Safety`, which say in Rust's words what a C function always asks: valid
/// pointers.
fn without_safety(header: &str) -> String {
    let (mut kept, mut skips) = (String::new(), false);
    for line in header.lines() {
        if line == "// # Safety" {
            skips = true;
            // The empty comment line before it.
            if kept.ends_with("//\n") {
                kept.truncate(kept.len() - "//\n".len());
            }
        }
        skips = skips && line.starts_with("//");
        if !skips {
            kept.push_str(line);
            kept.push('\n');
        }
    }
    kept
}
