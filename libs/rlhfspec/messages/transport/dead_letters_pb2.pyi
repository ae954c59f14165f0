from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class DeadLetter(_message.Message):
    __slots__ = ("subject", "id", "consumer", "num_deliveries", "reason", "data")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    NUM_DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    subject: str
    id: str
    consumer: str
    num_deliveries: int
    reason: str
    data: bytes
    def __init__(self, subject: _Optional[str] = ..., id: _Optional[str] = ..., consumer: _Optional[str] = ..., num_deliveries: _Optional[int] = ..., reason: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...
