//! CSI `SnapshotMetadata`: which ranges of a snapshot hold data, and which differ from an earlier
//! one.
//!
//! A stream that ends well says that all was told, so whatever goes wrong ends it with a status, or
//! ends the connection.

use super::{
    Edge, parse,
    pb::csi::{self as pb, snapshot_metadata_server},
};
use crate::{
    blocking::blocking,
    units::Bytes,
    volume::{Pair, Ranges, Wanted},
};
use futures_util::{TryStreamExt as _, stream};
use std::{ops::Range, pin::Pin};
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

/// The `SnapshotMetadata` service.
#[derive(Debug)]
pub struct SnapshotMetadata(pub Edge);

type Answer<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl snapshot_metadata_server::SnapshotMetadata for SnapshotMetadata {
    type GetMetadataAllocatedStream = Answer<pb::GetMetadataAllocatedResponse>;
    type GetMetadataDeltaStream = Answer<pb::GetMetadataDeltaResponse>;

    #[tracing::instrument(skip_all, fields(snapshot = request.get_ref().snapshot_id))]
    async fn get_metadata_allocated(
        &self,
        request: Request<pb::GetMetadataAllocatedRequest>,
    ) -> Result<Response<Self::GetMetadataAllocatedStream>, Status> {
        let request = request.into_inner();
        let wanted = Wanted::Allocated(parse::snapshot_id("snapshot_id", request.snapshot_id)??);
        let tell = |size: Bytes, block_metadata| pb::GetMetadataAllocatedResponse {
            block_metadata_type: pb::BlockMetadataType::VariableLength.into(),
            volume_capacity_bytes: size.into(),
            block_metadata,
        };
        self.answer(wanted, request.starting_offset, request.max_results, tell).await
    }

    #[tracing::instrument(skip_all, fields(
        base = request.get_ref().base_snapshot_id,
        target = request.get_ref().target_snapshot_id,
    ))]
    async fn get_metadata_delta(
        &self,
        request: Request<pb::GetMetadataDeltaRequest>,
    ) -> Result<Response<Self::GetMetadataDeltaStream>, Status> {
        let request = request.into_inner();
        let base = parse::snapshot_id("base_snapshot_id", request.base_snapshot_id)?;
        let target = parse::snapshot_id("target_snapshot_id", request.target_snapshot_id)?;
        let wanted = Wanted::Changed(Pair { base: base?, target: target? });
        let tell = |size: Bytes, block_metadata| pb::GetMetadataDeltaResponse {
            block_metadata_type: pb::BlockMetadataType::VariableLength.into(),
            volume_capacity_bytes: size.into(),
            block_metadata,
        };
        self.answer(wanted, request.starting_offset, request.max_results, tell).await
    }
}

/// How many ranges a message has at most: with 22 bytes each, far from gRPC's 4 MiB.
const MOST: usize = 8192;

impl SnapshotMetadata {
    async fn answer<T: Send + 'static>(
        &self,
        wanted: Wanted,
        starting_offset: i64,
        max_results: i32,
        message: fn(Bytes, Vec<pb::BlockMetadata>) -> T,
    ) -> Result<Response<Answer<T>>, Status> {
        let most = parse::most("max_results", max_results)?.min(MOST);
        let volumes = self.0.node.volumes().clone();
        let ranges = blocking(move || Ranges::open(volumes, wanted)).await?;
        let offset = parse::offset(starting_offset, ranges.size())?;
        let ranges = ranges.starting_at(offset);
        let messages = Messages { ranges, most, message, told: false };
        let parts = stream::try_unfold(messages, |left| blocking(move || left.more()));
        let each = parts.map_ok(|part| stream::iter(part.into_iter().map(Ok))).try_flatten();
        Ok(Response::new(Box::pin(each)))
    }
}

/// The messages of a stream, some at a time.
struct Messages<T> {
    ranges: Ranges,
    most: usize,
    message: fn(Bytes, Vec<pb::BlockMetadata>) -> T,
    /// Whether there was a message.
    told: bool,
}

impl<T> Messages<T> {
    /// The next messages, none perhaps, and what is left; `None` at the end.
    fn more(mut self) -> Result<Option<(Vec<T>, Self)>, Status> {
        let size = self.ranges.size();
        let blocks: Vec<_> = match self.ranges.next().transpose()? {
            Some(extents) => extents.into_iter().map(block).collect(),
            None if self.told => return Ok(None),
            None => {
                // The only one, for it tells the size.
                self.told = true;
                return Ok(Some((vec![(self.message)(size, Vec::new())], self)));
            }
        };
        let parts = blocks.chunks(self.most).map(|part| (self.message)(size, part.to_vec()));
        let messages: Vec<_> = parts.collect();
        self.told |= !messages.is_empty();
        Ok(Some((messages, self)))
    }
}

fn block(range: Range<u64>) -> pb::BlockMetadata {
    pb::BlockMetadata {
        byte_offset: Bytes::new(range.start).into(),
        size_bytes: Bytes::new(range.end - range.start).into(),
    }
}
