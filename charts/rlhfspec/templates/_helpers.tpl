{{- /* The release's own name for its parts: RELEASE-nats, or RELEASE-rlhfspec-nats. */}}
{{- define "rlhfspec.fullname" -}}
{{- $name := include "rlhfspec.name" . }}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride }}
{{- else if contains $name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- /* Of what belongs to no namespace. */}}
{{- define "rlhfspec.wideName" -}}
{{ .Release.Namespace }}-{{ include "rlhfspec.fullname" . }}
{{- end }}

{{- define "rlhfspec.name" -}}
{{ .Values.nameOverride | default .Chart.Name }}
{{- end }}

{{- define "rlhfspec.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/name: {{ include "rlhfspec.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* Of the pods of one component: (list . "nats"). */}}
{{- define "rlhfspec.selector" -}}
app.kubernetes.io/name: {{ include "rlhfspec.name" (index . 0) }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- /* (list . "slim"). As for Docker: what begins with a dot, a colon or localhost in it names its registry. */}}
{{- define "rlhfspec.image" -}}
{{- $images := (index . 0).Values.images -}}
{{- $image := index $images (index . 1) -}}
{{- $registry := has (index . 1) (list "nats" "redis") | ternary $images.serverRegistry $images.registry -}}
{{- if and $registry (not (regexMatch "^(localhost|[^/]*[.:][^/]*)/" $image.repository)) }}{{ $registry }}/{{ end -}}
{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default (index . 0).Chart.AppVersion }}{{ end }}
{{- end }}

{{- /* Ours are published nowhere: with nothing said of them each pod, the install hook first, would wait for ever. */}}
{{- define "rlhfspec.imagesAreThere" -}}
{{- $slim := .Values.images.slim }}
{{- $said := or .Values.images.registry $slim.tag $slim.digest (ne $slim.repository "rlhfspec/slim") (eq .Values.images.pullPolicy "Never") }}
{{- if not $said }}
{{- fail "images.registry: no images are published; build and push them by the three commands of docs/kubernetes.md#images, then --set images.registry=REGISTRY (or, where every node has them, images.pullPolicy=Never)" }}
{{- end }}
{{- end }}

{{- /* Made where none is named: jobs in the release's own namespace could name its keys. */}}
{{- define "rlhfspec.ownJobNamespace" -}}
{{ .Release.Namespace | trunc 58 | trimSuffix "-" }}-jobs
{{- end }}

{{- /* As a list without duplicates; sorted, so that renderings are the same. With scope cluster a label says it: none. */}}
{{- define "rlhfspec.jobNamespaces" -}}
{{- if eq .Values.operator.scope "cluster" -}}
{{- if .Values.operator.jobNamespaces }}{{ fail "operator.jobNamespaces: must be empty with operator.scope cluster, where operator.namespaceLabel selects the namespaces" }}{{ end -}}
[]
{{- else -}}
{{ .Values.operator.jobNamespaces | default (list (include "rlhfspec.ownJobNamespace" .)) | uniq | sortAlpha | toJson }}
{{- end }}
{{- end }}

{{- define "rlhfspec.claim" -}}
{{- if .Values.storage.claim }}{{ .Values.storage.claim }}
{{- else if .Values.storage.create.enabled }}{{ include "rlhfspec.fullname" . }}-storage{{ end }}
{{- end }}

{{- define "rlhfspec.natsUrl" -}}
{{- if .Values.nats.enabled -}}
tls://{{ include "rlhfspec.fullname" . }}-nats.{{ .Release.Namespace }}.svc:{{ (.Files.Get "files/names.yaml" | fromYaml).natsPort }}
{{- else -}}
{{ required "nats.external.url: needed when nats.enabled is false" .Values.nats.external.url }}
{{- end }}
{{- end }}

{{- define "rlhfspec.redisUrl" -}}
{{- if .Values.redis.enabled -}}
rediss://{{ include "rlhfspec.fullname" . }}-redis.{{ .Release.Namespace }}.svc:{{ (.Files.Get "files/names.yaml" | fromYaml).redisPort }}
{{- else -}}
{{ required "redis.external.url: needed when redis.enabled is false" .Values.redis.external.url }}
{{- end }}
{{- end }}

{{- /* "yes" where users and groups of pods are the cluster's to choose. */}}
{{- define "rlhfspec.isOpenshift" -}}
{{- $scc := .Capabilities.APIVersions.Has "security.openshift.io/v1" }}
{{- if or (eq .Values.openshift "always") (and (eq .Values.openshift "auto") $scc) }}yes{{ end }}
{{- end }}

{{- /* Metadata of a component's pods: (dict "root" . "component" "nats" "values" .Values.nats). */}}
{{- define "rlhfspec.podMetadata" -}}
labels:
  {{- merge (include "rlhfspec.selector" (list .root .component) | fromYaml) .values.podLabels | toYaml | nindent 2 }}
{{- with merge dict (.annotations | default dict) .values.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* What all pods have, and where they run; pod security `restricted`. Of the same. */}}
{{- define "rlhfspec.podSpec" -}}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- $security := dict "runAsNonRoot" true "seccompProfile" (dict "type" "RuntimeDefault") }}
{{- if not (include "rlhfspec.isOpenshift" .root) }}
{{- $security = merge $security (dict "runAsUser" 65532 "runAsGroup" 65532 "fsGroup" 65532 "fsGroupChangePolicy" "OnRootMismatch") }}
{{- end }}
enableServiceLinks: false
securityContext: {{- mergeOverwrite $security (deepCopy .values.podSecurityContext) | toYaml | nindent 2 }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- /* Image and security of a component's container: (dict "root" . "image" "slim" "values" .Values.nats). */}}
{{- define "rlhfspec.container" -}}
image: {{ include "rlhfspec.image" (list .root .image) }}
imagePullPolicy: {{ .root.Values.images.pullPolicy }}
{{- $security := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" (dict "drop" (list "ALL")) }}
securityContext: {{- mergeOverwrite $security (deepCopy .values.securityContext) | toYaml | nindent 2 }}
{{- end }}

{{- /* Of the operator's replicas: apart, where that can be. */}}
{{- define "rlhfspec.apart" -}}
{{- if not .Values.operator.affinity }}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {{- include "rlhfspec.selector" (list . "operator") | nindent 14 }}
{{- end }}
{{- with .Values.topologySpread }}
{{- if .enabled }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ .topologyKey }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "rlhfspec.selector" (list $ "operator") | nindent 8 }}
{{- end }}
{{- end }}
{{- end }}

{{- /* A ServiceAccount whose token nobody gets by default: (dict "root" . "name" NAME "annotations" {}), "namespace" too. */}}
{{- define "rlhfspec.serviceAccount" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ .name }}
  {{- with .namespace }}
  namespace: {{ . }}
  {{- end }}
  labels: {{- include "rlhfspec.labels" .root | nindent 4 }}
  {{- with .annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}

{{- /* At most one pod of the component is evicted at a time; of a single one that hinders no `kubectl drain`. */}}
{{- define "rlhfspec.budget" -}}
{{- if (index . 0).Values.podDisruptionBudgets.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "rlhfspec.fullname" (index . 0) }}-{{ index . 1 }}
  labels: {{- include "rlhfspec.labels" (index . 0) | nindent 4 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "rlhfspec.selector" . | nindent 6 }}
{{- end }}
{{- end }}
