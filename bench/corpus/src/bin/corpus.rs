//! Writes a file of distinct memory pages: `corpus --write FILE --mib N`.

use std::path::PathBuf;
use std::process::ExitCode;

use corpus::Corpus;

fn main() -> ExitCode {
    match arguments(std::env::args().skip(1)) {
        Ok(None) => {
            println!("{USAGE}");
            ExitCode::SUCCESS
        }
        Ok(Some((path, mib))) => {
            let rounds = Corpus::load().rounds();
            match rounds.write_to(&path, mib << 20) {
                Ok(()) => {
                    let round = rounds.round_len() >> 20;
                    println!("{}: {mib} MiB, rounds of {round} MiB", path.display());
                    ExitCode::SUCCESS
                }
                Err(error) => {
                    eprintln!("corpus: cannot write {}: {error}", path.display());
                    ExitCode::FAILURE
                }
            }
        }
        Err(why) => {
            eprintln!("corpus: {why}\n{USAGE}");
            ExitCode::from(2)
        }
    }
}

fn arguments(
    mut arguments: impl Iterator<Item = String>,
) -> Result<Option<(PathBuf, u64)>, String> {
    let (mut path, mut mib) = (None, None);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "--help" | "-h" => return Ok(None),
            "--write" => path = Some(PathBuf::from(value()?)),
            "--mib" => {
                let text = value()?;
                let number = text.parse().ok().filter(|mib| (1..=MOST_MIB).contains(mib));
                mib = Some(number.ok_or(format!("--mib {text}: expected 1 to {MOST_MIB}"))?);
            }
            other => return Err(format!("unknown argument {other}")),
        }
    }
    match (path, mib) {
        (Some(path), Some(mib)) => Ok(Some((path, mib))),
        _ => Err("both --write and --mib are needed".to_owned()),
    }
}

const USAGE: &str = "usage: corpus --write FILE --mib N";
/// 255 rounds of the synthetic data are slightly less than 16 GiB.
const MOST_MIB: u64 = 12 << 10;
