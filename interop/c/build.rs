//! Names the shared library in itself as `install.sh` names its link, so that programs look for
//! that.

fn main() {
    let [major, minor] = ["MAJOR", "MINOR"].map(|part| {
        std::env::var(format!("CARGO_PKG_VERSION_{part}")).expect("cargo says the version")
    });
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libmoesaic.so.{major}.{minor}");
    println!("cargo::rerun-if-changed=build.rs");
}
