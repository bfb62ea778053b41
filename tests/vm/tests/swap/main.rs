//! The tests of swap in guests, one after the other.
//!
//! ```text
//! cargo test --release -p vm-tests --test swap -- [FILTER...] [--list] [--quick]
//!     [--shard=N/M [--claims=FOLDER]]
//! ```
//!
//! A scenario runs if its name contains one of the filters; with `--quick`, if it is in the choice
//! of `make test`. Programs with the same folder of claims share the scenarios out among themselves
//! (`vm_tests::Shard`). Needs the files that `scripts/fetch-linux612` and `scripts/fetch-qemu 10`
//! unpack, and the binary of the same profile; fails without. `PLATEN_SWAP_SOAK=SECONDS` is the
//! length of the soak (60; 10 by NBD; 3 with `--quick`), `PLATEN_SWAP_BEYOND=MIB` what the program
//! has beyond the guest's memory (100; 20 with `--quick`), `PLATEN_SWAP_MEMORY=MIB` the guest's
//! memory (256; 192 with `--quick`), `PLATEN_SWAP_LARGE=MIB` that of the guests that store several
//! GiB (4096), `PLATEN_SWAP_LINUX=target/linux7` the guests' kernel (`scripts/fetch-linux7`;
//! without, 6.12).

mod disk;
mod limits;
mod redis;
mod renew;
mod sleep;
mod swapping;
mod takeover;

use std::process::ExitCode;
use std::time::Instant;

use vm_tests::swap::Stage;
use vm_tests::{cleanup, platen, swap, Shard};

/// A test: a claim, and the code that checks it.
pub(crate) struct Scenario {
    /// A claim.
    name: &'static str,
    run: fn(&Stage) -> anyhow::Result<()>,
}

/// The choice of `--quick`: both transports under pressure.
const QUICK: [&str; 2] =
    ["swap by ublk: eaten memory", "swap by the kernel's NBD client: the same"];

const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "a ublk disk keeps what is written, also when its server is killed",
        run: disk::by_ublk,
    },
    Scenario {
        name: "swap by ublk: eaten memory is whole, the server killed under pressure, taken back",
        run: swapping::by_ublk,
    },
    Scenario { name: "swap by the kernel's NBD client: the same", run: swapping::by_nbd },
    Scenario {
        name: "swap by ublk with every setting the kernel's own: whole, the server killed under pressure",
        run: swapping::untuned_by_ublk,
    },
    Scenario {
        name: "swap by the kernel's NBD client with every setting the kernel's own: the same",
        run: swapping::untuned_by_nbd,
    },
    Scenario {
        name: "swap by ublk with lz4 and many threads: a server is replaced with memory exhausted",
        run: swapping::many_threads,
    },
    Scenario {
        name: "swap by ublk: servers killed in a row, while the kernel interrupts its own threads",
        run: takeover::in_a_row,
    },
    Scenario {
        name: "several GiB swapped out by ublk: a server is replaced with memory exhausted",
        run: takeover::large,
    },
    Scenario {
        name: "several GiB swapped out with lz4 and 8 CPUs: the same",
        run: takeover::large_with_many_threads,
    },
    Scenario {
        name: "swap by ublk: a server that is stopped under pressure is killed and replaced",
        run: swapping::stopped_by_ublk,
    },
    Scenario {
        name: "swap by the kernel's NBD client: a server that is stopped is killed and replaced",
        run: swapping::stopped_by_nbd,
    },
    Scenario {
        name: "what is swapped out by ublk goes on to a disk and comes back, the server killed meanwhile",
        run: swapping::written_back_by_ublk,
    },
    Scenario {
        name: "what is swapped out by NBD goes on to a disk and comes back: the same",
        run: swapping::written_back_by_nbd,
    },
    Scenario {
        name: "a server that waits for a disk that does not answer is killed and replaced",
        run: disk::hung_backing,
    },
    Scenario {
        name: "a server that writes to a disk that does not answer is killed and replaced, and no page is written over",
        run: disk::hung_in_a_write,
    },
    Scenario {
        name: "another program takes the server's place by ublk under pressure, and other settings",
        run: renew::by_ublk,
    },
    Scenario {
        name: "another program takes the server's place by the kernel's NBD client: the same",
        run: renew::by_nbd,
    },
    Scenario {
        name: "the program of an earlier commit hands its device over to this one, and by NBD gets none back",
        run: renew::from_an_earlier_commit,
    },
    Scenario {
        name: "a ublk disk that is swapped to grows, or is refused by a kernel that cannot do it",
        run: renew::grows,
    },
    Scenario {
        name: "a supervisor killed at each step of a hand-over: the disk is served on, by one server",
        run: renew::supervisor_killed,
    },
    Scenario {
        name: "a host that swaps by ublk does not hibernate, and goes on after suspension and a frozen cgroup",
        run: sleep::sleep,
    },
    Scenario { name: "a memory limit that is reached costs no byte", run: limits::memory_limit },
    Scenario { name: "a full swap device costs no byte", run: limits::device_full },
    Scenario {
        name: "pages that do not compress, with the default limit: one program is ended, the rest is whole",
        run: limits::incompressible,
    },
    Scenario {
        name: "redis beyond memory: every value comes back, with platen and with zram",
        run: redis::beyond_memory,
    },
    Scenario {
        name: "redis values that are read again: the kernel's freed slots are used again",
        run: redis::read_again,
    },
    Scenario {
        name: "a dictionary is trained from what redis has swapped out, and used, the server killed meanwhile",
        run: redis::with_a_dictionary,
    },
];

fn main() -> ExitCode {
    let (flags, filters): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|word| word.starts_with('-'));
    let quick = flags.iter().any(|flag| flag == "--quick");
    let wanted = |scenario: &&Scenario| {
        (filters.is_empty() || filters.iter().any(|filter| scenario.name.contains(filter.as_str())))
            && (!quick || QUICK.iter().any(|name| scenario.name.starts_with(name)))
    };
    let unknown = |filter: &&String| !SCENARIOS.iter().any(|one| one.name.contains(&***filter));
    if let Some(filter) = filters.iter().find(unknown) {
        eprintln!("swap: no scenario has '{filter}' in its name (--list)");
        return ExitCode::FAILURE;
    }
    let shard = match shard(&flags) {
        Ok(shard) => shard,
        Err(error) => {
            eprintln!("swap: {error}");
            return ExitCode::FAILURE;
        }
    };
    let chosen: Vec<&Scenario> = SCENARIOS.iter().filter(wanted).collect();
    if flags.iter().any(|flag| flag == "--list") {
        let order = shard.order(chosen.len());
        order.iter().for_each(|number| println!("{}: test", chosen[*number].name));
        return ExitCode::SUCCESS;
    }
    if let Some(why) = swap::missing() {
        eprintln!("swap: {} scenarios cannot run: {why}", chosen.len());
        return ExitCode::FAILURE;
    }
    for (name, value) in
        [("PLATEN_SWAP_MEMORY", "192"), ("PLATEN_SWAP_SOAK", "3"), ("PLATEN_SWAP_BEYOND", "20")]
    {
        if quick && std::env::var_os(name).is_none() {
            std::env::set_var(name, value);
        }
    }
    match run(&chosen, &shard) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(failed) => {
            println!("{failed} scenarios failed");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("swap: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The shard of these flags, which is all without one.
fn shard(flags: &[String]) -> anyhow::Result<Shard> {
    let mut shard = Shard::default();
    for flag in flags {
        match flag.split_once('=') {
            Some(("--shard", words)) => shard.set(words)?,
            Some(("--claims", folder)) => shard.share(folder),
            _ => {}
        }
    }
    Ok(shard)
}

fn run(chosen: &[&Scenario], shard: &Shard) -> anyhow::Result<usize> {
    cleanup::install()?;
    println!("binary under test: {}", platen::binary()?.display());
    let stage = Stage::new()?;
    let mut failed = 0;
    for number in shard.order(chosen.len()) {
        if !shard.claim(number)? {
            continue;
        }
        let scenario = chosen[number];
        let begin = Instant::now();
        let result = (scenario.run)(&stage);
        let took = begin.elapsed().as_secs_f64();
        match result {
            Ok(()) => println!("test {} ... ok ({took:.1} s)", scenario.name),
            Err(error) => {
                failed += 1;
                println!("test {} ... FAILED ({took:.1} s)\n  {error:#}", scenario.name);
            }
        }
    }
    Ok(failed)
}
