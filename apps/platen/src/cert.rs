//! `platen cert`: a small CA for the hosts between which VMs move.

use crate::say::show;
use clap::{Args, Subcommand};
use std::path::PathBuf;
use tls::{Authority, DEFAULT_DIR};

/// Arguments of `platen cert`.
#[derive(Args)]
pub(crate) struct CertArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Make a CA. Keep its folder on one safe host
    Init(InitArgs),
    /// Sign a certificate for a host
    Issue(IssueArgs),
}

#[derive(Args)]
struct InitArgs {
    /// Folder of the CA
    #[arg(long, value_name = "DIR", default_value = "platen-ca")]
    dir: PathBuf,
    /// Replace an existing CA. Every certificate that the old one signed becomes invalid
    #[arg(long)]
    force: bool,
}

#[derive(Args)]
struct IssueArgs {
    /// Host names and IP addresses of the host, as --peer names it
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// Folder of the CA
    #[arg(long, value_name = "DIR", default_value = "platen-ca")]
    dir: PathBuf,
    /// Days for which the certificate is valid, 1 to 3650
    #[arg(long, default_value_t = 825, value_parser = clap::value_parser!(u32).range(1..=3650))]
    days: u32,
    /// Replace an existing certificate
    #[arg(long)]
    force: bool,
}

pub(crate) fn run(args: &CertArgs) -> anyhow::Result<()> {
    match &args.what {
        What::Init(args) => {
            Authority::at(&args.dir).init(args.force)?;
            let dir = args.dir.display();
            show(&format!(
                "Made a CA in {dir}. Whoever has {dir}/ca-key.pem can deliver VMs to your hosts and take theirs:\n\
                 keep the folder on one safe host. Next, for each host, by the name or address that --peer will give:\n  \
                 platen cert issue NAME --dir {dir}\n"
            ))
        }
        What::Issue(args) => {
            let issued = Authority::at(&args.dir).issue(&args.names, args.days, args.force)?;
            let (dir, name) = (issued.dir.display(), &args.names[0]);
            show(&format!(
                "Made a certificate for {}, good until {}. Next, put it on that host for root alone:\n  \
                 ssh root@{name} mkdir -p -m 700 {DEFAULT_DIR}\n  \
                 scp {dir}/*.pem root@{name}:{DEFAULT_DIR}/\n\
                 or for another user anywhere, with --tls-dir; then delete {dir}/key.pem here.\n\
                 Its fingerprint, with which `revoked` of platen.toml excludes it (also in {ca}/issued):\n  {}\n",
                args.names.join(", "),
                issued.until,
                issued.fingerprint,
                ca = args.dir.display()
            ))
        }
    }
}
