//! `qsd-csi relay`: the relay process, and orders for it.

use super::{block_on, standalone::RUN_DIR};
use crate::{
    relay::{self, Client},
    run::RunDir,
};
use clap::Subcommand;
use std::{
    io::{self, Write as _},
    path::PathBuf,
};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Run directory of the driver
    #[arg(long, value_name = "DIR", default_value = RUN_DIR)]
    run_dir: PathBuf,
    #[command(subcommand)]
    order: Option<Order>,
}

#[derive(Debug, Subcommand)]
enum Order {
    /// Speak for all volumes; started by the relay itself
    #[command(hide = true)]
    Work,
    /// Tell of the relay and its volumes, as JSON
    List,
    /// Replace the program of the relay under running VMs
    Upgrade {
        /// The new qsd-csi; this one, if none is given
        program: Option<PathBuf>,
    },
}

pub(super) fn run(args: Args) -> anyhow::Result<()> {
    let run = RunDir::open(&args.run_dir)?;
    run.relay().create()?;
    match args.order {
        None => relay::keep(run),
        Some(Order::Work) => relay::work(run),
        Some(Order::List) => block_on(async {
            let status = Client::new(run).list().await?;
            Ok(writeln!(io::stdout(), "{}", serde_json::to_string_pretty(&status)?)?)
        }),
        Some(Order::Upgrade { program }) => {
            let program = match program {
                Some(program) => program,
                None => std::env::current_exe()?,
            };
            block_on(async { Ok(Client::new(run).upgrade(&program).await?) })
        }
    }
}
