//! The `moesaic` command line.

fn main() -> std::process::ExitCode {
    moesaic_cli::start()
}
