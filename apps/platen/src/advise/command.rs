//! The command line for a method.

use super::AdviseArgs;
use codec::Codec;
use forecast::Method;
use std::path::{Path, PathBuf};

/// Where QEMU listens if it migrates by itself.
const PORT: &str = "4444";

/// QEMU encrypts nothing by default; platen does.
const PLAIN: &str = "# the memory crosses the network unencrypted, unless QEMU has tls-creds";

/// The addresses in the commands, as far as they are known.
pub(super) struct Addresses {
    qmp: String,
    peer: String,
    /// Options of `platen migrate` with which the forecast was made.
    options: String,
    /// Settings of QEMU with which it was made, as its monitor takes them.
    settings: Vec<String>,
}

impl Addresses {
    /// Without `is_capped` the forecasts of QEMU's methods have no max-bandwidth, which is 128
    /// MiB/s by QEMU's default.
    pub(super) fn new(args: &AdviseArgs, is_capped: bool) -> Self {
        let mut options = String::new();
        let mut add = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                options.push_str(&format!(" --{name} {value}"));
            }
        };
        let path = |path: &PathBuf| path.display().to_string();
        let tls = &args.tls;
        add("peer-name", args.peer_name.clone());
        let is_usual = tls.tls_dir.as_path() == Path::new(tls::DEFAULT_DIR);
        add("tls-dir", (!is_usual).then(|| path(&tls.tls_dir)));
        add("tls-ca", tls.tls_ca.as_ref().map(path));
        add("tls-cert", tls.tls_cert.as_ref().map(path));
        add("tls-key", tls.tls_key.as_ref().map(path));
        add("max-downtime", args.max_downtime.map(|ms| ms.to_string()));
        if tls.insecure {
            options.push_str(" --insecure");
        }
        let set = |name: &str, value: u64| format!("(qemu) migrate_set_parameter {name} {value}");
        let downtime = args.max_downtime.map(|ms| set("downtime-limit", ms));
        let bandwidth = (!is_capped).then(|| set("max-bandwidth", 0));
        Self {
            qmp: args.qmp.as_ref().map_or("unix:PATH".to_owned(), ToString::to_string),
            peer: args.peer.clone().unwrap_or_else(|| "HOST:PORT".to_owned()),
            options,
            settings: downtime.into_iter().chain(bandwidth).collect(),
        }
    }

    /// The commands of `method`: of a shell, or of QEMU's monitor (HMP).
    pub(super) fn commands(&self, method: Method, channels: u64) -> Vec<String> {
        let Self { qmp, peer, options, settings } = self;
        let host = peer.rsplit_once(':').map_or("HOST", |(host, _)| host);
        let go = || {
            let go = [format!("(qemu) migrate -d tcp:{host}:{PORT}"), PLAIN.to_owned()];
            settings.iter().cloned().chain(go)
        };
        let multifd = |compression: &str| {
            let set = [
                "(qemu) migrate_set_capability multifd on".to_owned(),
                format!("(qemu) migrate_set_parameter multifd-channels {channels}"),
                format!("(qemu) migrate_set_parameter multifd-compression {compression}"),
                "# the same at the destination, then".to_owned(),
            ];
            set.into_iter().chain(go()).collect()
        };
        let platen =
            |codec: &str| vec![format!("platen migrate --qmp {qmp} --peer {peer}{options}{codec}")];
        match method {
            Method::Qemu => go().collect(),
            Method::QemuZstd => multifd("zstd"),
            Method::QemuZlib => multifd("zlib"),
            Method::Platen => platen(""),
            Method::PlatenWith(settings) if settings.is_qpl() => platen(" --codec qpl"),
            Method::PlatenWith(settings) => match settings.codec() {
                Codec::DeflateQz => platen(" --codec qatzip --accelerator qat"),
                codec => platen(&format!(" --codec {codec}")),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use codec::Settings;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: AdviseArgs,
    }

    fn addresses(words: &[&str], is_capped: bool) -> Addresses {
        let line = Line::parse_from([&["advise"], words].concat());
        Addresses::new(&line.args, is_capped)
    }

    #[test]
    fn commands_name_what_is_known() {
        let known = ["--qmp", "unix:/run/q", "--peer", "there:7000"];
        let here = addresses(&known, true);
        assert_eq!(
            here.commands(Method::Platen, 4),
            ["platen migrate --qmp unix:/run/q --peer there:7000"]
        );
        let lz4 = Method::PlatenWith(Settings::new(Codec::Lz4, None).unwrap());
        assert!(here.commands(lz4, 4)[0].ends_with("--codec lz4"));
        let zstd = here.commands(Method::QemuZstd, 4);
        assert!(zstd[1].ends_with("channels 4") && zstd[4].ends_with("tcp:there:4444"), "{zstd:?}");
        let alone = addresses(&[], true).commands(Method::Qemu, 2);
        assert_eq!(alone[0], "(qemu) migrate -d tcp:HOST:4444");
        assert!(alone[1].contains("unencrypted"), "{alone:?}");
    }

    #[test]
    fn commands_have_the_settings_of_their_forecast() {
        let words = ["--peer", "there:7000", "--max-downtime", "2000", "--insecure"];
        let here = addresses(&words, false);
        assert_eq!(
            here.commands(Method::Platen, 4),
            ["platen migrate --qmp unix:PATH --peer there:7000 --max-downtime 2000 --insecure"]
        );
        let alone = here.commands(Method::Qemu, 2);
        assert_eq!(alone[0], "(qemu) migrate_set_parameter downtime-limit 2000");
        assert_eq!(alone[1], "(qemu) migrate_set_parameter max-bandwidth 0");
        let named = addresses(&["--peer", "there:1", "--peer-name", "b", "--tls-dir", "/k"], true);
        let line = &named.commands(Method::Platen, 4)[0];
        assert!(line.ends_with("--peer-name b --tls-dir /k"), "{line}");
    }
}
