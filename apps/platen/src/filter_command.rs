//! `platen filter`, and this program under the name `zstd` or `gzip`: a compressor between two
//! pipes, as libvirt starts it for `virsh save`.

use anyhow::{bail, Context};
use clap::{Args, ValueEnum};
use filter::{compress, decompress, Format, Options};
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::thread::available_parallelism;

/// Bytes of a pipe's buffer: the kernel's limit for any user. A larger one saves wake-ups.
const PIPE: usize = 1 << 20;

/// Arguments of `platen filter`.
#[derive(Args, Debug)]
pub(crate) struct FilterArgs {
    /// Format of the compressed side
    #[arg(value_enum)]
    format: Name,
    /// Decompress
    #[arg(short, long)]
    decompress: bool,
    /// Level: zstd 1 to 19, gzip 1 to 12
    #[arg(long, default_value_t = 1)]
    level: i32,
    /// Number of threads [default: the number of CPUs]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: Option<u16>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Name {
    /// zstd frames of 2 MiB of plain bytes
    Zstd,
    /// gzip members of 1 MiB of plain bytes
    Gzip,
}

impl Name {
    fn format(self) -> Format {
        match self {
            Self::Zstd => Format::Zstd,
            Self::Gzip => Format::Gzip,
        }
    }
}

pub(crate) fn run(args: &FilterArgs) -> anyhow::Result<ExitCode> {
    let threads = args.threads.map(usize::from);
    let threads = threads.unwrap_or_else(|| available_parallelism().map_or(1, usize::from));
    let (stdin, stdout) = (rustix::stdio::stdin(), rustix::stdio::stdout());
    for fd in [stdin, stdout] {
        // Not every one is a pipe.
        let _ = rustix::pipe::fcntl_setpipe_size(fd, PIPE);
    }
    let mut input = File::from(stdin.try_clone_to_owned().context("cannot read standard input")?);
    let output = stdout.try_clone_to_owned();
    let mut output = File::from(output.context("cannot write to standard output")?);
    let format = args.format.format();
    if args.decompress {
        decompress(format, threads, &mut input, &mut output)?;
    } else {
        let options = Options { level: args.level, ..Options::new(format, threads) };
        compress(&options, &mut input, &mut output)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs as `zstd` or `gzip`, if this program was started under that name. For any other use than
/// filtering standard input it runs the next program of that name in PATH.
pub(crate) fn as_program() -> Option<anyhow::Result<ExitCode>> {
    let mut words = std::env::args_os();
    let name = words.next()?;
    let name = Path::new(&name).file_name()?.to_str()?.to_owned();
    let format = [Name::Zstd, Name::Gzip].into_iter().find(|it| it.format().name() == name)?;
    let words: Vec<OsString> = words.collect();
    Some(match parse(format, &words) {
        Some(args) => run(&args),
        None => other_program(&name, &words),
    })
}

/// The levels that this program has, under either name.
const LEVELS: std::ops::RangeInclusive<i32> = 1..=19;

/// The arguments that both programs and this one understand; `None` if there is any other.
fn parse(format: Name, words: &[OsString]) -> Option<FilterArgs> {
    // Both programs write to a file by default, and refuse terminals.
    let mut args = FilterArgs { format, decompress: false, level: 1, threads: None };
    let (mut to_stdout, mut force) = (false, false);
    for word in words {
        match word.to_str()? {
            "-" | "--quiet" | "--keep" => {}
            "--force" => force = true,
            "--decompress" => args.decompress = true,
            "--stdout" | "--to-stdout" => to_stdout = true,
            "--fast" | "--best" | "--help" | "--version" => return None,
            word => {
                let mut letters = word.strip_prefix('-').filter(|it| !it.starts_with('-'))?;
                while let Some(letter) = letters.chars().next() {
                    letters = &letters[letter.len_utf8()..];
                    match letter {
                        'c' => to_stdout = true,
                        'd' => args.decompress = true,
                        'q' | 'k' => {}
                        'f' => force = true,
                        'T' if letters == "0" => letters = "",
                        'T' => {
                            args.threads = Some(letters.parse().ok()?);
                            letters = "";
                        }
                        // gzip reads each digit as a level, and the last one counts.
                        '1'..='9' if format == Name::Gzip => {
                            args.level = letter.to_digit(10)?.cast_signed();
                        }
                        '1'..='9' => {
                            let end = letters.find(|c: char| !c.is_ascii_digit());
                            let (rest, after) = letters.split_at(end.unwrap_or(letters.len()));
                            args.level = format!("{letter}{rest}").parse().ok()?;
                            letters = after;
                        }
                        _ => return None,
                    }
                }
            }
        }
    }
    // The usual program clamps other levels, or refuses them, with its own words.
    if !args.decompress && !LEVELS.contains(&args.level) {
        return None;
    }
    // Then both programs pass on what is not compressed.
    let passes_on = args.decompress && force;
    (to_stdout && !passes_on).then_some(args)
}

/// How many folders of which PATH have been searched, for a program of this name that is a copy of
/// platen: two copies would run each other for ever.
const SEARCHED: &str = "PLATEN_FILTER_SEARCHED";

/// Executes the next program of this name in PATH.
fn other_program(name: &str, words: &[OsString]) -> anyhow::Result<ExitCode> {
    let own = std::fs::canonicalize("/proc/self/exe").context("cannot tell where platen is")?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let searched = |folders: usize| {
        let mut searched = OsString::from(format!("{folders} "));
        searched.push(&path);
        searched
    };
    let before = std::env::var_os(SEARCHED);
    let folders: Vec<_> = std::env::split_paths(&path).collect();
    let of_path = |folders: &usize| before.as_ref() == Some(&searched(*folders));
    let first = (0..=folders.len()).find(of_path).unwrap_or(0);
    for (nth, folder) in folders.iter().enumerate().skip(first) {
        let program = folder.join(name);
        let is_own = std::fs::canonicalize(&program).is_ok_and(|path| path == own);
        if !is_own && program.is_file() {
            let mut command = Command::new(&program);
            let error = command.args(words).env(SEARCHED, searched(nth + 1)).exec();
            bail!("cannot run {}: {error}", program.display());
        }
    }
    bail!(
        "platen as {name} only compresses (-c) and decompresses (-dc) standard input, and PATH has \
         no other {name}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_arguments_are_understood_and_others_are_refused() {
        let parsed_as = |name, line: &str| {
            let words: Vec<OsString> = line.split_whitespace().map(Into::into).collect();
            parse(name, &words).map(|args| (args.decompress, args.level, args.threads))
        };
        let parsed = |line| parsed_as(Name::Zstd, line);
        for (line, expected) in [
            ("-c", (false, 1, None)),
            ("-dc", (true, 1, None)),
            ("-d -c -q -", (true, 1, None)),
            ("-c -3", (false, 3, None)),
            ("-19c -T0", (false, 19, None)),
            ("-T4 -c", (false, 1, Some(4))),
            ("--decompress --stdout", (true, 1, None)),
            ("-cf", (false, 1, None)),
        ] {
            assert_eq!(parsed(line), Some(expected), "{line}");
        }
        for line in [
            "-cdf",
            "-dc --force",
            "",
            "-d",
            "-c file",
            "-l -c",
            "--rm -c",
            "-c --long=31",
            "-T4x -c",
            "-V",
            "-c -b",
            "-20 -c",
            "-99999999999c",
        ] {
            assert_eq!(parsed(line), None, "{line}");
        }
        // zstd refuses no level of a stream that it decompresses.
        assert_eq!(parsed("-22 -dc").map(|(decompress, ..)| decompress), Some(true));
        // gzip reads one digit at a time.
        for (line, level) in [("-19c", 9), ("-91 -c", 1), ("-c -6", 6), ("-c", 1)] {
            assert_eq!(parsed_as(Name::Gzip, line), Some((false, level, None)), "{line}");
        }
    }
}
